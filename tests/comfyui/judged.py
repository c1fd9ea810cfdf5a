"""What ComfyUI reads off a MODEL, its options, a condition and a latent, and what becomes of it under a CP Sampler; and
what becomes of its text encoders under CP CLIP, and of its VAEs under CP VAE.

`HONOURED`: it reaches the workers, or ComfyUI's own code reads it in its own process. `STEPWISE`: the loop then stays
in ComfyUI's process. `REFUSED`: by name. `WITHOUT_EFFECT` on a latent.
"""

from __future__ import annotations

from parallel_runtime.architectures.autoencoders import COMPARED, ENGINE, WHOLE

HONOURED, STEPWISE, REFUSED, WITHOUT_EFFECT = "honoured", "stepwise", "refused", "without effect"

Judgement = tuple[str, str]  # and why


def alike(verdict: str, reason: str, keys: str) -> dict[str, Judgement]:
    return dict.fromkeys(keys.split(), (verdict, reason))


MODEL_OPTIONS = {
    **alike(
        HONOURED, "described as a whole, in the order that ComfyUI calls them",
        "context_handler denoise_mask_function disable_cfg1_optimization model_function_wrapper "
        "sampler_calc_cond_batch_function sampler_cfg_function sampler_post_cfg_function sampler_pre_cfg_function "
        "transformer_options",
    ),
    **alike(WITHOUT_EFFECT, "made anew in the workers, from the conditions' hooks", "registered_hooks to_load_options"),
    **alike(WITHOUT_EFFECT, "only while ComfyUI's own network runs on several GPUs",
            "multigpu_clones multigpu_thread_pool ignore_multigpu multigpu_options"),
    **alike(WITHOUT_EFFECT, "an option of a loader of this name, which is no MODEL's",
            "dtype fp8_optimizations load_device offload_device"),
}  # fmt: skip

TRANSFORMER_OPTIONS = {
    **alike(HONOURED, "described; all prompts and images stay together where a patch may look at several",
            "patches patches_replace optimized_attention_override"),
    **alike(HONOURED, "around the loop and the network: described with those of the MODEL, or the loop stays here",
            "wrappers"),
    **alike(WITHOUT_EFFECT, "ComfyUI calls those of the MODEL alone, which are described", "callbacks"),
    **alike(
        HONOURED, "a plain value, which the network or a patch reads",
        "a2v_cross_attn ar_config audio_embeds chroma_radiance_options minimax_h3_sigma_shift_audio "
        "minimax_h3_sigma_shift_video rope_options run_ax run_vx stg_self_attn_blocks stg_skip_self_attn "
        "v2a_cross_attn",
    ),
    **alike(
        HONOURED, "made by ComfyUI's code around the network or in it, in every worker, of what the worker has",
        "activations_shape block block_index block_type cond_or_uncond context_window grid_sizes img_slice "
        "model_patch_data original_shape reference_image_num_tokens sample_sigmas sigmas total_blocks "
        "transformer_index transformer_options uuids x_ref_attn_map attn_precision dim_head n_heads model",
    ),
    "ar_state": (HONOURED, "of a sampler that reaches into the network: it runs whole, or is refused stepwise"),
    "easycache": (HONOURED, "an object for wrappers, which see all prompts and images"),
    "animate2_cache": (HONOURED, "shared with a callback: prompts and images stay together, refused stepwise"),
    **alike(WITHOUT_EFFECT, "only where ComfyUI itself moves weights or has several GPUs",
            "multigpu_thread_device prefetch_dynamic_vbars"),
}  # fmt: skip

CONDITION = {
    **alike(
        HONOURED, "described, key by key",
        "area clip_end_percent clip_start_percent control control_apply_to_uncond cross_attn default end_percent "
        "gligen hooks mask mask_strength model_conds set_area_to_bounds start_percent strength timestep_end "
        "timestep_start",
    ),
    "additional_models": (STEPWISE, "models of a pack that only ComfyUI's process has"),
    "uuid": (WITHOUT_EFFECT, "made anew: it only tells conditions of one run apart"),
}  # fmt: skip

MODEL_CONDITION = {  # what a network's `extra_conds` reads of a condition
    **alike(
        HONOURED, "described, whatever a condition calls it",
        "aesthetic_score area aspect_ratio attention_mask attention_mask_img_shape attention_mask_mt5xl "
        "audio_codes audio_embed audio_inject_scale augmentation_level azimuth camera_conditions "
        "clip_vision_output clip_vision_output_pose clip_vision_output_ref clip_vision_outputs "
        "concat_image concat_latent_image concat_mask concat_mask_index condition conditioning_byt5small "
        "conditioning_llama3 conditioning_lyrics conditioning_mt5xl conditioning_scale context_latents "
        "control_video crop_h crop_w cross_attn cross_attn_controlnet cross_attn_pose degrade_sigma "
        "driving_mask_28ch elevation embeds face_video_pixels fps frame_rate generated_keyframes "
        "guidance guide_attention_entries guiding_frame_index height keyframe_idxs lq_latent "
        "lyrics_strength minimax_audio_cond_noise_aug minimax_keyframes minimax_refs minimax_token_tags "
        "minimax_visual_cond_noise_aug motion_bucket_id noise_augmentation noise_concat ofs "
        "pooled_output pose_strength pose_video_latent ref_audio ref_latent ref_mask_28ch ref_mask_flag "
        "reference_audio_timbre_latents reference_latents reference_latents_method "
        "reference_latents_text_embeds reference_motion reference_strength seconds_start seconds_total "
        "stable_cascade_prior t5xxl_ids t5xxl_weights target_height target_width text_input_ids "
        "time_conditioning time_dim_concat time_dim_replace unclip_conditioning "
        "unclip_noise_augment_merge unprocessed_ltxav_embeds vace_frames vace_mask vace_strength width",
    ),
    **alike(HONOURED, "given by the run, in every worker",
            "denoise_mask device latent_image latent_shapes noise prompt_type seed"),
}  # fmt: skip

LATENT = alike(
    HONOURED, "read by the native node, in ComfyUI's process", "batch_index downscale_ratio_spacial "
    "downscale_ratio_temporal noise_mask samples latent_tensor latent_format_version_0",
)  # fmt: skip

PATCHER = {
    "model": (HONOURED, "loaded again from the file that it is of; what is not from there is refused"),
    **alike(HONOURED, "described", "callbacks model_options patches wrappers"),
    "cached_patcher_init": (HONOURED, "says which file; refused where there is none"),
    "force_cast_weights": (HONOURED, "goes with a replaced manual_cast_dtype"),
    "object_patches": (HONOURED, "those of the sampling, the dtype and plain values; others are stepwise or refused"),
    "additional_models": (STEPWISE, "models that only ComfyUI's process has; clones on other GPUs are left out"),
    **alike(HONOURED, "of a condition's hooks, which are described", "hook_patches hook_patches_backup"),
    **alike(REFUSED, "code or weights inside the network", "forced_hooks injections weight_wrapper_patches"),
    **alike(WITHOUT_EFFECT, "ComfyUI's own book-keeping while this MODEL is injected, of what is refused",
            "is_injected skip_injection"),
    **alike(
        WITHOUT_EFFECT, "where weights are, or whose they are, in ComfyUI's process",
        "backup backup_buffers cached_hook_patches clone_base_uuid current_hooks hook_backup hook_mode is_clip "
        "is_multigpu_base_clone load_device non_dynamic_delegate_model object_patches_backup offload_device parent "
        "patches_uuid pinned size weight_inplace_update _free_methods _last_free_log_time _last_prepare_log_key",
    ),
    "attachments": (WITHOUT_EFFECT, "read by nodes, never by a run"),
}  # fmt: skip

GUIDER = {
    **alike(HONOURED, "described; every other attribute too, or the loop stays here",
            "cfg conds model_options model_patcher"),
    **alike(WITHOUT_EFFECT, "made in a run, or what `conds` are made of", "inner_model loaded_models original_conds"),
}  # fmt: skip

WRAPPERS = {
    "OUTER_SAMPLE": (HONOURED, "those before our own run in ComfyUI's process, those behind it in the workers"),
    **alike(HONOURED, "in the workers, on all prompts and images",
            "PREPARE_SAMPLING SAMPLER_SAMPLE PREDICT_NOISE CALC_COND_BATCH"),
    "APPLY_MODEL": (HONOURED, "in the workers; all prompts stay together where it keeps what it sees"),
    "DIFFUSION_MODEL": (HONOURED, "in the workers; all prompts and images stay together"),
}  # fmt: skip

CALLBACKS = {  # of packs
    "ON_CLONE": (HONOURED, "called by ComfyUI's process whenever the MODEL is cloned"),
    **alike(HONOURED, "in every worker; those of a pack that workers cannot have, by ComfyUI's process around each run",
            "ON_CLEANUP ON_PRE_RUN ON_PREPARE_STATE"),
    "ON_DETACH": (HONOURED, "called by ComfyUI's process, which has what the workers' run has left"),
    "ON_APPLY_HOOKS": (HONOURED, "in every worker, which then evaluates all prompts; hooks are refused stepwise"),
    "ON_REGISTER_ALL_HOOK_PATCHES": (STEPWISE, "called by ComfyUI's process before a run is described"),
    "ON_LOAD": (REFUSED, "it may change weights or layers that are loaded, and workers load their own"),
    **alike(WITHOUT_EFFECT, "called for injections alone, which are refused", "ON_INJECT_MODEL ON_EJECT_MODEL"),
    **alike(WITHOUT_EFFECT, "called for clones on other GPUs alone, which are left out",
            "ON_DEEPCLONE_MULTIGPU ON_MATCH_MULTIGPU_CLONES"),
}  # fmt: skip

HOOKS = {
    "Weight": (HONOURED, "described with the condition; refused where the loop is stepwise"),
    "AdditionalModels": (STEPWISE, "models that only ComfyUI's process has"),
    "TransformerOptions": (STEPWISE, "it has changed the model options by then, and would in the workers once more"),
    **alike(WITHOUT_EFFECT, "ComfyUI raises NotImplementedError", "ObjectPatch Injections"),
}  # fmt: skip

TEXT_ENCODERS = {  # under CP CLIP, by the class of `cond_stage_model`
    **alike(
        HONOURED, "compared with ComfyUI's own to the bit, tiny: test_clip.py",
        "flux.FluxClipModel qwen_image.QwenImageTEModel sa_t5.SAT5Model sd1_clip.SD1ClipModel sdxl_clip.SDXLClipModel "
        "sdxl_clip.SDXLRefinerClipModel z_image.ZImageTEModel",
    ),
    **alike(
        HONOURED, "one encoder of the same kinds of layers, with other layers, templates or lengths",
        "anima.AnimaTEModel aura_t5.AuraT5Model cogvideo.CogVideoXT5XXL cosmos.CosmosT5XXL ernie.ErnieTEModel "
        "flux.Flux2TEModel genmo.MochiT5XXL jina_clip_2.JinaClip2TextModelWrapper longcat_image.LongCatImageTEModel "
        "omnigen2.Omnigen2Model ovis.OvisTEModel pixart_t5.PixArtT5XXL sa3.SAT5GemmaModel sd2_clip.SD2ClipModel "
        "sdxl_clip.StableCascadeClipModel wan.WanT5Model wan.WanTEModel lumina2.LuminaModel pixeldit.PixelDiTGemma2TE",
    ),
    **alike(
        HONOURED, "several encoders in one CLIP, on one worker or in stages",
        "ace.AceT5Model hidream.HiDreamTEModel hunyuan_image.HunyuanImageTEModel hydit.HyditModel "
        "hunyuan_video.HunyuanVideoClipModel kandinsky5.Kandinsky5TEModel newbie.NewBieTEModel sd3_clip.SD3ClipModel",
    ),
    **alike(
        HONOURED, "tokens carry images, video frames or sound as tensors, which are sent",
        "boogu.BooguTEModel gemma4.Gemma4TEModel_ ideogram4.Ideogram4Qwen3VLTEModel ideogram4.Ideogram4TEModel "
        "joyimage.JoyImageTEModel krea2.Krea2TEModel mage_flow.MageFlowTEModel minimax.MiniMaxH3TEModel "
        "qwen35.Qwen35TEModel qwen3vl.Qwen3VLTEModel",
    ),
    **alike(
        HONOURED, "draws audio codes as it encodes, from a generator with the seed of the tokens; never in stages",
        "ace15.ACE15TEModel minimax_music.MiniMaxMusic3TEModel",
    ),
    "lt.LTXAVTEModel": (HONOURED, "its projection is a part of it; its estimate of memory counts in the plan"),
    **alike(HONOURED, "the number of its layers goes back as a plain value",
            "gpt_oss.LensTEModel gpt_oss.LensGptOssClipModel"),
    "sam3_clip.SAM3ClipModelWrapper": (HONOURED, "one condition a prompt goes back in a list"),
    "hidream_o1.HiDreamO1TE": (WITHOUT_EFFECT, "no weights: ComfyUI passes the tokens on to the network"),
}  # fmt: skip

VAES = {  # under CP VAE, by the class of `first_stage_model`
    **{
        kind if kind.startswith(ENGINE) else kind.partition("(")[0]: (HONOURED, "divided: tests/rows compares it")
        for kind in COMPARED
    },
    **{kind: (WITHOUT_EFFECT, f"whole, in ComfyUI's process, which says: {words}") for kind, words in WHOLE.items()},
}
