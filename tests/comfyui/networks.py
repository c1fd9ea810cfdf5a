"""Networks in files: a tiny one of each class of ComfyUI's that has a plan, with the conditioning its users give it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..architectures import tiny
from .client import Graph
from .graphs import Job, Parallel, sampling_graph

JOB = Job(family="flux_dev", cfg=2.0, steps=3, latent_seed=4)


@dataclass(frozen=True, kw_only=True)
class Network:
    """`model` is the class of comfy.supported_models; `latent` are the sides after the batch, of each part; `beside`
    are the shapes of weights that its file has beside the network."""

    build: Any
    model: str
    latent: tuple[tuple[int, ...], ...]
    dim: int = 96
    tokens: int = 7
    batch: int = 2
    more_weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        return ";".join(",".join(map(str, (self.batch, *sides))) for sides in self.latent)

    def spec(self, tokens: int) -> dict[str, Any]:
        return {"tokens": tokens, "dim": self.dim, **self.more}


IMAGE, FRAMES, FLUX2_SIZE = (16, 17, 23), (16, 3, 9, 14), (128, 9, 13)
POOLED, ALL_VALID = {"pooled": 64}, {"mask_valid": 99}


def tensors(**shapes: Any) -> dict[str, Any]:
    return {"tensors": shapes}


def references(*shapes: tuple[int, ...], method: str = "") -> dict[str, Any]:
    return tensors(reference_latents=shapes) | ({"values": {"reference_latents_method": method}} if method else {})


def flux(model: str = "Flux", channels: int = 16, **more: Any) -> Network:
    build = partial(tiny.flux, in_channels=channels, guidance_embed=model != "FluxSchnell")
    return Network(build=build, model=model, latent=(IMAGE,), more=POOLED | more)


def flux2(guidance: bool = True, **more: Any) -> Network:
    build = partial(tiny.flux2, guidance_embed=guidance)
    return Network(build=build, model="Flux2", latent=(FLUX2_SIZE,), tokens=512, more=more)


def wan(
    model: str, *, kind: str = "WanModel", sides: tuple[int, ...] = FRAMES, conditions: Any = None, **config: Any
) -> Network:
    return Network(build=partial(tiny.wan, kind, **config), model=model, latent=(sides,), more=conditions or {})


def qwen(**more: Any) -> Network:
    return Network(build=tiny.qwen, model="QwenImage", latent=((16, 1, 17, 23),), more=more)


def hunyuan(model: str, sides: tuple[int, ...], more: dict[str, Any], batch: int = 2, **config: Any) -> Network:
    return Network(build=partial(tiny.hunyuan, **config), model=model, latent=(sides,), more=more, batch=batch)


def seconds(name: str, learned: bool) -> dict[str, tuple[int, ...]]:
    """What turns a piece's start or length into a condition."""
    stem = f"conditioner.conditioners.seconds_{name}.embedder.embedding"
    shapes = {f"{stem}.1.weight": (768, 256 + learned), f"{stem}.1.bias": (768,)}
    return shapes | ({f"{stem}.0.weights": (128,)} if learned else {})


SEEN = {"seen": (1, 257, 1280)}
NETWORKS: dict[str, Network] = {
    "flux_fill": flux("FluxInpaint", 96, **tensors(concat_latent_image=(1, 16, 17, 23))),
    "flux_depth": flux("Flux", 32, **tensors(concat_latent_image=(1, 16, 17, 23))),
    "flux_kontext": flux(**references((1, 16, 11, 13), (1, 16, 8, 6))),
    "flux_uso": flux(**references((1, 16, 11, 13), (1, 16, 8, 6), method="uxo")),
    "flux_redux": flux(**tensors(attention_mask=(1, 7 + 108, 7 + 108))),
    "flux2": flux2(),
    "flux2_references": flux2(**references((1, 128, 5, 6))),
    "flux2_klein": flux2(guidance=False, **references((1, 128, 5, 6))),
    "longcat": Network(
        build=partial(tiny.flux, guidance_embed=False, vec_in_dim=None, txt_ids_dims=[1, 2]), model="LongCatImage",
        latent=(IMAGE,),
    ),
    "ovis": Network(
        build=partial(tiny.flux, guidance_embed=False, vec_in_dim=None, txt_ids_dims=[1, 2], yak_mlp=True),
        model="FluxSchnell", latent=(IMAGE,),
    ),
    "chroma": Network(build=tiny.chroma, model="Chroma", latent=(IMAGE,)),
    "wan_i2v": wan(
        "WAN21_I2V", model_type="i2v", in_dim=36, conditions=SEEN | tensors(concat_latent_image=(1, 16, *FRAMES[1:]))
    ),
    "wan_first_and_last_frame": wan(
        "WAN21_I2V", model_type="i2v", in_dim=36, flf_pos_embed_token_number=514,
        conditions={"seen": (1, 514, 1280)} | tensors(concat_latent_image=(1, 16, *FRAMES[1:])),
    ),
    "wan_5b": wan("WAN22_T2V", in_dim=48, out_dim=48, sides=(48, 3, 9, 14)),
    "wan_vace": wan(
        "WAN21_Vace", kind="VaceWanModel", vace_layers=2, vace_in_dim=96, num_layers=4, sides=(16, 3, 10, 14),
        conditions=tensors(vace_frames=[(1, 32, 3, 10, 14), (1, 32, 3, 10, 14)], vace_mask=[(1, 64, 3, 10, 14)] * 2)
        | {"values": {"vace_strength": [1.0, 0.7]}},
    ),
    "wan_camera": wan(
        "WAN21_Camera", kind="CameraWanModel", model_type="camera", in_dim=32, sides=(16, 3, 10, 14),
        conditions=SEEN | tensors(camera_conditions=(1, 24, 3, 80, 112), concat_latent_image=(1, 16, 3, 10, 14)),
    ),
    "wan_fun_control": wan(
        "WAN21_FunControl2V", model_type="i2v", in_dim=48, in_dim_ref_conv=16, sides=(16, 3, 10, 14),
        conditions=SEEN | tensors(concat_latent_image=(1, 32, 3, 10, 14), reference_latents=[(1, 16, 1, 10, 14)]),
    ),
    "wan22_i2v": wan("WAN21_I2V", in_dim=36, sides=(16, 3, 10, 14),
                     conditions=tensors(concat_latent_image=(1, 16, 3, 10, 14))),
    "wan22_camera": wan(
        "WAN22_Camera", kind="CameraWanModel", model_type="camera_2.2", in_dim=36, sides=(16, 3, 10, 14),
        conditions=tensors(camera_conditions=(1, 24, 3, 80, 112), concat_latent_image=(1, 16, 3, 10, 14)),
    ),
    "wan22_fun_control": wan(
        "WAN21_FunControl2V", in_dim=52, in_dim_ref_conv=16, sides=(16, 3, 10, 14),
        conditions=tensors(concat_latent_image=(1, 32, 3, 10, 14), reference_latents=[(1, 16, 1, 10, 14)]),
    ),
    "wan22_fun_control_5b": wan(
        "WAN22_T2V", in_dim=148, out_dim=48, in_dim_ref_conv=48, sides=(48, 3, 10, 14),
        conditions=tensors(concat_latent_image=(1, 96, 3, 10, 14), reference_latents=[(1, 48, 1, 10, 14)]),
    ),
    "wan_talking_i2v": wan("WAN21_I2V", model_type="i2v", in_dim=36, dim=240, sides=(16, 3, 10, 14),
                           conditions=SEEN | tensors(concat_latent_image=(1, 16, 3, 10, 14))),
    "wan_talking": wan("WAN21_T2V", dim=240, sides=(16, 3, 10, 14)),  # 40 heads of its voices go into that
    "wan_phantom": wan("WAN21_T2V", conditions=tensors(time_dim_concat=(1, 16, 2, 9, 14))),
    "qwen_edit": qwen(**references((1, 16, 1, 11, 13))),
    "qwen_edit_2511": qwen(**references((1, 16, 1, 11, 13), (1, 16, 1, 8, 6), method="index_timestep_zero")),
    "z_image": Network(build=partial(tiny.lumina, True), model="ZImage", latent=(IMAGE,)),
    "lumina2": Network(build=partial(tiny.lumina, False), model="Lumina2", latent=(IMAGE,), more={"mask_valid": 5}),
    "sd35_large": Network(build=tiny.sd3, model="SD3", latent=(IMAGE,), more=POOLED),
    "sd35_medium": Network(build=partial(tiny.sd3, True), model="SD3", latent=(IMAGE,), more=POOLED),
    "hunyuan_i2v": hunyuan(
        "HunyuanVideo", (16, 3, 6, 10), POOLED | {"mask_valid": 5} | tensors(ref_latent=(1, 16, 1, 6, 10)), batch=1
    ),
    "hunyuan_15": hunyuan(
        "HunyuanVideo15", (32, 3, 5, 7), POOLED | {"seen": (1, 12, 48)} | tensors(
            conditioning_byt5small=(1, 9, 1472), concat_latent_image=(1, 32, 3, 5, 7)),
        **tiny.HUNYUAN_15 | dict(in_channels=65, out_channels=32),
    ),
    "ltxv": Network(build=tiny.ltxv, model="LTXV", latent=((128, 3, 3, 5),), more={"mask_valid": 5}),
    "ltx2": Network(build=tiny.ltxav, model="LTXAV", latent=((128, 3, 3, 5), (8, 11, 16)), dim=192),
    "hidream": Network(
        build=tiny.hidream, model="HiDream", latent=(IMAGE,), more=POOLED | tensors(conditioning_llama3=(1, 3, 11, 80))
    ),
    "cosmos_predict2": Network(build=tiny.cosmos, model="CosmosT2IPredict2", latent=((16, 1, 17, 23),)),
    "anima": Network(build=tiny.anima, model="Anima", latent=((16, 1, 17, 23),), dim=1024),
    "kandinsky5": Network(
        build=partial(tiny.kandinsky5, 132), model="Kandinsky5", latent=((16, 3, 10, 14),), more=POOLED
    ),
    "kandinsky5_image": Network(
        build=partial(tiny.kandinsky5, 64), model="Kandinsky5Image", latent=((16, 17, 23),), more=POOLED
    ),
    "omnigen2": Network(
        build=tiny.omnigen2, model="Omnigen2", latent=(IMAGE,), more=ALL_VALID | references((1, 16, 8, 11))
    ),
    "boogu": Network(
        build=tiny.boogu, model="Boogu", latent=(IMAGE,), more=ALL_VALID | references((1, 16, 8, 11))
    ),
    "ernie_image": Network(build=tiny.ernie_image, model="ErnieImage", latent=(FLUX2_SIZE,)),
    "krea2": Network(build=tiny.krea2, model="Krea2", latent=((16, 1, 17, 23),), dim=192),
    "joyimage": Network(
        build=tiny.joyimage, model="JoyImage", latent=((16, 1, 17, 23),), more=references((1, 16, 1, 8, 11))
    ),
    "cogvideox": Network(build=tiny.cogvideox, model="CogVideoX_T2V", latent=(FRAMES,)),
    "lens": Network(build=tiny.lens, model="Lens", latent=(FLUX2_SIZE,), dim=192, tokens=24, more={"mask_valid": 11}),
    "wan_scail": wan(
        "WAN21_SCAIL", kind="SCAILWanModel", model_type="scail", in_dim=20,
        conditions=SEEN | tensors(reference_latents=[(1, 16, 1, 9, 14)], pose_video_latent=(1, 16, 3, 5, 7)),
    ),
    "wan_scail_2": wan(
        "WAN21_SCAIL2", kind="SCAIL2WanModel", model_type="scail2", in_dim=20,
        conditions=SEEN | {"values": {"ref_mask_flag": False}} | tensors(
            reference_latents=[(1, 16, 1, 9, 14)], pose_video_latent=(1, 16, 3, 5, 7),
            ref_mask_28ch=(1, 4, 28, 9, 14), driving_mask_28ch=(1, 3, 28, 5, 7)),
    ),
    "wan_animate": Network(
        build=tiny.wan_animate, model="WAN22_Animate", latent=((16, 3, 10, 14),),
        more=SEEN | tensors(pose_video_latent=(1, 16, 2, 10, 14), concat_latent_image=(1, 16, 3, 10, 14)),
    ),
    "wan_s2v": Network(
        build=tiny.wan_s2v, model="WAN22_S2V", latent=((16, 3, 10, 14),),
        more=tensors(
            audio_embed=(1, 25, 48, 12), reference_latents=[(1, 16, 1, 10, 14)], reference_motion=(1, 16, 19, 10, 14),
            control_video=(1, 16, 3, 10, 14)),
    ),
    "humo": wan(
        "WAN21_HuMo", kind="HumoWanModel", model_type="humo", sides=(16, 3, 10, 14),
        conditions=tensors(audio_embed=(1, 3, 8, 5, 1280), reference_latents=[(1, 16, 1, 10, 14)]),
    ),
    "wandancer": Network(
        build=tiny.wan_dancer, model="WAN22_WanDancer", latent=((16, 3, 10, 16),),
        more=SEEN | {"values": {"fps": 15, "audio_inject_scale": 0.8}} | tensors(
            audio_embed=(1, 10, 35), concat_latent_image=(1, 16, 3, 10, 16)),
    ),
    "chroma_radiance": Network(build=tiny.chroma_radiance, model="ChromaRadiance", latent=((3, 36, 44),)),
    "aura_flow": Network(build=tiny.aura_flow, model="AuraFlow", latent=((4, 17, 23),)),
    "pixart": Network(build=tiny.pixart, model="PixArtSigma", latent=((4, 34, 46),)),
    "hunyuan_dit": Network(
        build=tiny.hunyuan_dit, model="HunyuanDiT1", latent=((4, 17, 23),), tokens=12,
        more={"mask_valid": 5} | tensors(conditioning_mt5xl=(1, 9, 128), attention_mask_mt5xl=(1, 9)),
    ),
    "hunyuan_3d": Network(build=tiny.hunyuan_3d, model="Hunyuan3Dv2", latent=((64, 35),)),
    "hunyuan_3d_21": Network(build=tiny.hunyuan_3d_21, model="Hunyuan3Dv2_1", latent=((64, 35),)),
    "triposplat": Network(
        build=tiny.triposplat, model="TripoSplat", latent=((37, 16), (1, 5)), tokens=23,
        more=references((1, 128, 3, 6)),
    ),
    "mage_flow": Network(
        build=tiny.mage_flow, model="MageFlow", latent=(FLUX2_SIZE,), more=ALL_VALID | references((1, 128, 5, 6))
    ),
    "z_image_pixels": Network(build=tiny.lumina_pixels, model="ZImagePixelSpace", latent=((3, 33, 45),)),
    "ideogram4": Network(build=tiny.ideogram4, model="Ideogram4", latent=(FLUX2_SIZE,), more={"mask_valid": 5}),
    "pixeldit": Network(build=tiny.pixeldit, model="PixelDiTT2I", latent=((3, 33, 45),)),
    "pid": Network(
        build=tiny.pid, model="PiD", latent=((3, 33, 45),),
        more={"numbers": {"degrade_sigma": [0.4]}} | tensors(lq_latent=(1, 16, 5, 6)),
    ),
    "cosmos1": Network(build=tiny.cosmos1, model="CosmosT2V", latent=((16, 3, 10, 14),)),
    "mochi": Network(
        build=tiny.mochi, model="GenmoMochi", latent=((12, 3, 10, 14),), tokens=24, more={"mask_valid": 5}
    ),
    "minimax_h3": Network(
        build=tiny.minimax_h3, model="MiniMaxH3", latent=((24, 3, 5, 7), (32, 2, 11)), batch=1
    ),
    "causal_wan": Network(build=tiny.causal_wan, model="WAN21_CausalAR_T2V", latent=(FRAMES,)),
    "ace_step_15": Network(
        build=tiny.ace_step15, model="ACEStep15", latent=((64, 35),),
        more=tensors(conditioning_lyrics=(1, 9, 96), reference_audio_timbre_latents=[(1, 64, 40)]),
    ),
    "stable_audio": Network(
        build=partial(tiny.stable_audio, io_channels=64, cond_token_dim=768, project_cond_tokens=True,
                      global_cond_dim=1536),
        model="StableAudio", latent=((64, 37),), dim=768,
        more_weights=seconds("start", learned=True) | seconds("total", learned=True),
    ),
    "stable_audio_3": Network(
        build=partial(tiny.stable_audio_3, io_channels=256, cond_token_dim=768, project_cond_tokens=True,
                      global_cond_dim=768, local_add_cond_dim=257),
        model="StableAudio3", latent=((256, 37),), dim=768, more_weights=seconds("total", learned=False),
    ),
    "hidream_o1": Network(
        build=tiny.hidream_o1, model="HiDreamO1", latent=((3, 160, 224),),
        more={"numbers": {"text_input_ids": [[11, 12, 13, 14, 15, 16, 17, 151673]]}},
    ),
    "stage_c": Network(
        build=partial(tiny.cascade, "stage C", c_in=16, c_out=16, c_clip_img=768), model="Stable_Cascade_C",
        latent=((16, 13, 9),), dim=24, more={"pooled": 24},
    ),
    "stage_b": Network(
        build=partial(tiny.cascade, "stage B", c_effnet=16), model="Stable_Cascade_B", latent=((4, 32, 24),), dim=24,
        more={"pooled": 24} | tensors(stable_cascade_prior=(1, 16, 3, 4)),
    ),
}  # fmt: skip
WITHOUT_PLAN: dict[str, Network] = {
    "wan_animate_2": Network(
        build=tiny.wan_animate_2, model="WAN_Animate2", latent=((16, 3, 10, 14),),
        more=SEEN | tensors(pose_video_latent=(1, 16, 3, 10, 14), concat_latent_image=(1, 16, 3, 10, 14)),
    ),
    "seedvr2": Network(build=tiny.seedvr2, model="SeedVR2", latent=((16, 3, 10, 14),), dim=5120, tokens=58),
}  # fmt: skip
BY_ROWS = ("stage_c", "stage_b")  # of which there are no stages of a pipeline


def picture(name: str, parallel: Parallel | None = None) -> Graph:
    """A graph that samples it, natively or divided; its file lies in the folder that `write_networks` fills."""
    network = NETWORKS[name]
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"]["inputs"]["unet_name"] = f"networks/{name}.safetensors"
    for text, tokens in ("positive", network.tokens), ("negative", max(network.tokens, 12)):
        graph[text]["inputs"]["spec"] = json.dumps(network.spec(tokens))
    graph["latent"]["inputs"]["shape"] = network.shape
    return graph
