"""Tiny random UNets of ComfyUI's own class: structure as published, few channels. Runs in ComfyUI's python."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..zoo import tiny

Config = dict[str, Any]

COMMON: Config = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
}  # fmt: skip
SD15: Config = COMMON | {
    "model_channels": 32, "num_res_blocks": [2] * 4, "channel_mult": [1, 2, 4, 4], "num_heads": 8, "context_dim": 24,
    "transformer_depth": [1] * 6 + [0, 0], "transformer_depth_middle": 1, "use_linear_in_transformer": False,
    "transformer_depth_output": [1] * 9 + [0] * 3,
}  # fmt: skip
PROJECTED = {"num_heads": -1, "num_head_channels": 16, "use_linear_in_transformer": True}
SEEN = {"num_classes": "sequential", "adm_in_channels": 20}
SDXL: Config = SD15 | PROJECTED | SEEN | {
    "num_res_blocks": [2] * 3, "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 1, 1, 2, 2],
    "transformer_depth_middle": 2, "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
}  # fmt: skip
DEEP: Config = SDXL | {
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
}  # fmt: skip
REFINER: Config = SDXL | {
    "num_res_blocks": [2] * 4, "channel_mult": [1, 2, 4, 4], "transformer_depth": [0, 0, 1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1, "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0],
}  # fmt: skip
VIDEO: Config = SD15 | PROJECTED | SEEN | {
    "in_channels": 8, "use_temporal_attention": True, "use_temporal_resblock": True, "extra_ff_mix_layer": True,
    "use_spatial_context": True, "merge_strategy": "learned_with_images", "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1],
}  # fmt: skip
UNETS: dict[str, Config] = {
    "SD1.5": SD15,
    "SD1.5 inpaint": SD15 | {"in_channels": 9},
    "SD2, 3 heads": SD15 | PROJECTED | {"model_channels": 96, "num_head_channels": 32},
    "SD2 unclip": SD15 | PROJECTED | SEEN,
    "SDXL": SDXL,
    "SDXL, full depth": DEEP,
    "SDXL refiner": REFINER,
    "SVD": VIDEO,
    "resblock_updown": SD15 | PROJECTED | {"resblock_updown": True, "use_scale_shift_norm": True},
    "pooled": SD15 | {"conv_resample": False},  # the last two fail at odd sizes, undivided too
}
FRAMES = 3


@lru_cache(1)
def made(name: str) -> Any:
    return tiny.build("ldm.modules.diffusionmodules.openaimodel:UNetModel", **UNETS[name])


def inputs(name: str, rows: int, columns: int, batch: int = 1) -> dict[str, Any]:
    config, dice = UNETS[name], torch.Generator().manual_seed(rows * 1000 + columns)
    video = "use_temporal_attention" in config
    batch *= FRAMES if video else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice)

    made: dict[str, Any] = {
        "x": normal(batch, config["in_channels"], rows, columns),
        "timesteps": torch.linspace(700, 300, batch),
        "context": normal(batch, 1 if video else 77, config["context_dim"]),
    }
    if config.get("num_classes"):
        made["y"] = normal(batch, config["adm_in_channels"])
    if video:
        made |= {"num_video_frames": FRAMES, "image_only_indicator": torch.zeros(batch // FRAMES, FRAMES)}
    return made
