"""The table's networks of convolutions: UNets, with few channels, and the stages of Stable Cascade.

Those with the structure of published files are called directly; the `shallow` ones are written into files, too.
"""

from __future__ import annotations

from typing import Any

from .networks import Config, Network, of

UNET = "modules.diffusionmodules.openaimodel:UNetModel"
TEXT, POOLED = 64, 32  # numbers a token of a shallow UNet's text, numbers of its pooled output
POOLED_XL = 1280  # as in SDXL's own files: ComfyUI adds noise to what CLIP vision saw in this width
SIZES = 6 * 256  # of a picture, as SDXL's network reads them
GLIGEN_TEXT = 768  # ComfyUI goes by it: eight heads

COMMON: Config = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "model_channels": 32, "num_heads": 8,
}  # fmt: skip
SD15: Config = COMMON | {
    "num_res_blocks": [2] * 4, "channel_mult": [1, 2, 4, 4], "context_dim": 24, "transformer_depth": [1] * 6 + [0, 0],
    "transformer_depth_middle": 1, "use_linear_in_transformer": False, "transformer_depth_output": [1] * 9 + [0] * 3,
}  # fmt: skip
PROJECTED = {"num_heads": -1, "num_head_channels": 16, "use_linear_in_transformer": True}
OF_FRAMES = {
    "in_channels": 8, "use_temporal_attention": True, "use_temporal_resblock": True, "extra_ff_mix_layer": True,
    "use_spatial_context": True, "merge_strategy": "learned_with_images", "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1],
}  # fmt: skip


def seen(width: int) -> Config:
    return {"num_classes": "sequential", "adm_in_channels": width}


SDXL: Config = SD15 | PROJECTED | seen(20) | {
    "num_res_blocks": [2] * 3, "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 1, 1, 2, 2],
    "transformer_depth_middle": 2, "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
}  # fmt: skip
UNION: Config = SDXL | {  # the code of a union of ControlNets has a fixed width
    "model_channels": 320, "num_res_blocks": [1] * 3, "channel_mult": [1, 1, 1], "transformer_depth": [0, 1, 1],
    "transformer_depth_middle": 1, "transformer_depth_output": [0, 0, 1, 1, 1, 1], "num_head_channels": 64,
}  # fmt: skip
SHALLOW: Config = COMMON | {
    "num_res_blocks": [1, 1], "channel_mult": (1, 2), "transformer_depth": [1, 1], "num_head_channels": -1,
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1, "disable_self_attentions": None,
    "use_linear_in_transformer": True, "context_dim": TEXT,
}  # fmt: skip
STAGE_C: Config = {
    "c_in": 16, "c_out": 16, "c_r": 16, "c_cond": 32, "c_hidden": [48, 48], "nhead": [3, 3],
    "blocks": [[1, 2], [2, 1]], "c_clip_text": 24, "c_clip_text_pooled": 24, "c_clip_img": 768,
    "stable_cascade_stage": "c",
}  # fmt: skip
STAGE_B: Config = {
    "c_in": 4, "c_out": 4, "c_r": 16, "c_cond": 32, "c_hidden": [16, 24, 48], "nhead": [-1, 3, 3],
    "blocks": [[1, 1, 2], [2, 1, 1]], "block_repeat": [[1, 1, 1], [2, 2, 1]], "level_config": ["CT", "CTA", "CTAF"],
    "c_clip": 24, "c_effnet": 16, "dropout": [0, 0, 0], "stable_cascade_stage": "b",
}  # fmt: skip


def shallow(model: str, more: Config | None = None, **changes: Any) -> Network:
    return of(UNET, model, **SHALLOW | changes | (more or {}))


UNET_FILES: dict[str, Network] = {  # which unet_files.py writes
    "unet": shallow("SDXL", seen(POOLED + SIZES)),
    "unet_xl": shallow("SDXL", seen(POOLED_XL + SIZES)),
    "unet_refiner": shallow("SDXLRefiner", seen(TEXT + SIZES - 256)),
    "unet_inpaint": shallow("SD15", in_channels=9),
    "unet_pix2pix": shallow("SD15_instructpix2pix", in_channels=8),
    "unet_4x": shallow("SD_X4Upscaler", in_channels=7, num_classes=1000),
    "unet_unclip": shallow("SD21UnclipL", seen(2 * 768)),
    "unet_svd": shallow("SVD_img2vid", seen(3 * 256), **OF_FRAMES, disable_temporal_crossattention=False),
    "unet_sv3d": shallow("SV3D_p", seen(5 * 256), **OF_FRAMES, disable_temporal_crossattention=False),
    "unet_gligen": shallow("SD15", context_dim=GLIGEN_TEXT),
    "unet_lotus": shallow("LotusD", seen(4), context_dim=1024),
    "unet_zero123": shallow("Stable_Zero123", in_channels=8, context_dim=768),
}
UNETS: dict[str, Network] = UNET_FILES | {
    "sd15": shallow("SD15"),
    "sd15_calm": shallow("SD15", context_dim=32, use_linear_in_transformer=False),
    "sdxl": UNET_FILES["unet"],
    "sdxl_wide": shallow("SDXL", seen(POOLED + SIZES), model_channels=320, channel_mult=(1, 1)),
    "SD1.5": of(UNET, **SD15),
    "SD1.5 inpaint": of(UNET, **SD15 | {"in_channels": 9}),
    "SD2, 3 heads": of(UNET, **SD15 | PROJECTED | {"model_channels": 96, "num_head_channels": 32}),
    "SD2 unclip": of(UNET, **SD15 | PROJECTED | seen(20)),
    "SDXL": of(UNET, **SDXL),
    "SDXL, full depth": of(UNET, **SDXL | {
        "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10]}),
    "SDXL refiner": of(UNET, **SDXL | {
        "num_res_blocks": [2] * 4, "channel_mult": [1, 2, 4, 4], "transformer_depth": [0, 0, 1, 1, 1, 1, 0, 0],
        "transformer_depth_middle": 1, "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]}),
    "SVD": of(UNET, **SD15 | PROJECTED | seen(20) | OF_FRAMES),
    "resblock_updown": of(UNET, **SD15 | PROJECTED | {"resblock_updown": True, "use_scale_shift_norm": True}),
    "pooled": of(UNET, **SD15 | {"conv_resample": False}),  # the last two fail at odd sizes, undivided too
    "union": of(UNET, **UNION),
    "stage_c": of("cascade.stage_c:StageC", "Stable_Cascade_C", **STAGE_C),
    "stage_b": of("cascade.stage_b:StageB", "Stable_Cascade_B", **STAGE_B),
    "stage C": of("cascade.stage_c:StageC", **STAGE_C | {"c_in": 4, "c_out": 4, "c_clip_img": 20}),
    "stage B": of("cascade.stage_b:StageB", **STAGE_B | {"c_effnet": 5}),
}  # fmt: skip
