"""What the sweep over nodes cannot know by itself: which network a node is for, which runs are refused, and what cannot
be tried."""

from __future__ import annotations

USUAL = ("flux", "unet")  # the benches of a node that is for any network


def _by_node(table: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """For every node the keys that it stands behind."""
    nodes = {node for names in table.values() for node in names.split()}
    return {node: tuple(key for key, names in table.items() if node in names.split()) for node in nodes}


ONLY_ON = _by_node({  # by bench: what is for one kind of network
    "ace_step_15": "EmptyAceStep1.5LatentAudio ReferenceTimbreAudio",
    "anima": "AnimaLLLiteApply LotusConditioning",
    "causal_wan": "ARVideoI2V EmptyARVideoLatent SamplerARVideo",
    "chroma_radiance": "ChromaRadianceOptions EmptyChromaRadianceLatentImage",
    "cogvideox": "VOIDInpaintConditioning VOIDSampler VOIDWarpedNoiseSource",
    "cosmos1": "CosmosImageToVideoLatent EmptyCosmosLatentVideo",
    "cosmos_predict2": "CosmosPredict2ImageToVideoLatent",
    "flux2": "EmptyFlux2LatentImage",
    "flux2_klein": "FluxKVCache",
    "flux": "CLIPTextEncodeFlux LoadLatent",
    "flux_style": "USOStyleReference",
    "hidream_o1": "EmptyHiDreamO1LatentImage HiDreamO1PatchSeamSmoothing HiDreamO1ReferenceImages",
    "humo": "WanHuMoImageToVideo",
    "hunyuan_15": "EmptyHunyuanVideo15Latent",
    "hunyuan_3d": "EmptyLatentHunyuan3Dv2 Hunyuan3Dv2Conditioning Hunyuan3Dv2ConditioningMultiView",
    "hunyuan_i2v":
        "EmptyHunyuanLatentVideo HunyuanImageToVideo HunyuanRefinerLatent TextEncodeHunyuanVideo_ImageToVideo",
    "joyimage": "TextEncodeJoyImageEdit",
    "kandinsky5": "Kandinsky5ImageToVideo",
    "ltx2": "LTXVConcatAVLatent LTXVDualCFGGuider LTXVModalityGuidance LTXVSeparateAVLatent",
    "ltxv":
        "EmptyLTXVLatentVideo LTXVAddGuide LTXVConditioning LTXVContextWindows LTXVCropGuides LTXVImgToVideo "
        "LTXVImgToVideoInplace LTXVScheduler LTXVSpatioTemporalGuidance ModelSamplingLTXV",
    "lumina2": "LatentInterpolate RenormCFG TemporalScoreRescaling",
    "mage_flow": "TextEncodeMageFlowEdit",
    "minimax_h3": "EmptyMiniMaxH3LatentAV MiniMaxH3SigmaShift",
    "mochi": "EmptyMochiLatentVideo",
    "qwen_edit": "EmptyQwenImageLayeredLatentImage",
    "qwen_image": "QwenImageDiffsynthControlnet",
    "stable_audio": "ConditioningStableAudio EmptyLatentAudio",
    "unet":
        "CLIPTextEncodeSDXL FlipSigmas FreeU FreeU_V2 HyperTile HypernetworkLoader "
        "ImageOnlyCheckpointLoader unCLIPCheckpointLoader "
        "PatchModelAddDownscale SelfAttentionGuidance SplitSigmasDenoise "
        "TomePatchModel",
    "unet_4x": "SD_4XUpscale_Conditioning",
    "unet_gligen": "GLIGENTextBoxApply",
    "unet_inpaint": "InpaintModelConditioning",
    "unet_pix2pix": "InstructPixToPixConditioning",
    "unet_refiner": "CLIPTextEncodeSDXLRefiner",
    "unet_sv3d": "SV3D_Conditioning",
    "unet_svd": "SVD_img2vid_Conditioning",
    "unet_unclip": "unCLIPConditioning",
    "unet_zero123": "StableZero123_Conditioning StableZero123_Conditioning_Batched",
    "wan":
        "BerniniConditioning CLIPTextEncodeSD3 ModelNoiseScale NormalizeVideoLatentStart ReplaceVideoLatentFrames "
        "SeedVR2TemporalChunk SeedVR2TemporalMerge TrimVideoLatent WanAnimate2Cache WanContextWindowsManual "
        "WanUni3CControlnetApply",
    "wan_animate": "WanAnimate2ToVideo WanAnimateToVideo",
    "wan_camera": "WanCameraImageToVideo",
    "wan_first_and_last_frame": "WanFirstLastFrameToVideo",
    "wan_fun_control": "Wan22FunControlToVideo WanFunControlToVideo",
    "wan_i2v": "WanFunInpaintToVideo WanImageToVideo WanMoveTrackToVideo WanTrackToVideo",
    "wan_phantom": "WanPhantomSubjectToVideo",
    "wan_s2v": "WanSoundImageToVideo WanSoundImageToVideoExtend",
    "wan_scail": "WanSCAILToVideo",
    "wan_vace": "WanVaceToVideo",
    "wandancer": "WanDancerVideo",
    "z_image": "TextEncodeZImageOmni",
})  # fmt: skip
BARE = {  # their optional sockets stay empty: pictures there are made to be of a million pixels
    "TextEncodeQwenImageEdit", "TextEncodeQwenImageEditPlus", "TextEncodeZImageOmni",
}  # fmt: skip
REFUSED = {  # by a sentence that names what it is
    ("FluxKVCache", "flux2_klein"),
    ("LTXVAddGuide", "ltxv"),
    ("LoraLoaderBypass", "flux"),
    ("LoraLoaderBypass", "unet"),
    ("LoraLoaderBypassModelOnly", "flux"),
    ("LoraLoaderBypassModelOnly", "unet"),
    ("SamplerARVideo", "causal_wan"),
}
NOT_TRIED = {node: reason for reason, nodes in {
    "the tests have no tiny VAE for sound":
        "LTXVAudioVAEEncode LTXVEmptyLatentAudio LTXVReferenceAudio VAEEncodeAudio",
    "the tests have no tiny text encoder with the tokens that it asks for":
        "CLIPTextEncodeHiDream CLIPTextEncodeHunyuanDiT CLIPTextEncodeKandinsky5 MiniMaxH3ImageToVideo "
        "MiniMaxH3AddGuide MiniMaxH3ReferenceToVideo MiniMaxMusic3TextEncode TextEncodeAceStepAudio "
        "TextEncodeAceStepAudio1.5 TextEncodeBooguEdit",
    "the tests have no tiny VAE of so many channels":
        "HunyuanVideo15ImageToVideo HunyuanVideo15SuperResolution Wan22ImageToVideoLatent "
        "StableCascade_StageC_VAEEncode StableCascade_SuperResolutionControlnet",
    "the tests have no tiny network of that kind":
        "EmptyAceStepLatentAudio EmptyMiniMaxMusic3LatentAudio EmptyTrellis2LatentStructure "
        "Pixal3DConditioning Trellis2Conditioning Trellis2ShapeStage Trellis2TextureStage "
        "Trellis2UpsampleStage SeedVR2Conditioning "
        "SUPIRApply StableCascade_StageB_Conditioning EmptyHunyuanImageLatent",
    "the tests have no tiny file of the kind that it reads":
        "PhotoMakerEncode HunyuanVideo15LatentUpscaleWithModel LTXVLatentUpsampler VOIDWarpedNoise",
    "the tests have no checkpoint or folder with everything that it reads":
        "CheckpointLoader DiffusersLoader LoadTrainingDataset",
    "it makes a list, which no sampler takes":
        "MakeTrainingDataset ResolutionBucket",
    "its inputs have to fit together; test_whole.py, test_patch_models.py and test_networks.py give it those":
        "PiDConditioning TripoSplatConditioning TripoSplatSamplingPreview WanInfiniteTalkToVideo ZImageFunControlnet",
    "it compiles for minutes; test_compile.py runs it":
        "TorchCompileModel",
}.items() for node in nodes.split()}  # fmt: skip


def benches_of(name: str) -> tuple[str, ...]:
    return ONLY_ON.get(name, USUAL)
