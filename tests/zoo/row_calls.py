"""What UNets and the stages of Stable Cascade are called with, at any size. The last one made is kept."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from .calls import Inputs
from .tiny import make
from .unets import UNETS

FRAMES = 3


@lru_cache(1)
def made(name: str) -> nn.Module:
    return make(name)


def unet(name: str, rows: int, columns: int, batch: int = 1, context: int = 0) -> Inputs:
    """`context` is the width of its text, where it is not the table's."""
    config, normal = UNETS[name].config, _normal(rows, columns)
    video = "use_temporal_attention" in config
    batch *= FRAMES if video else 1
    given: Inputs = {
        "x": normal(batch, config["in_channels"], rows, columns),
        "timesteps": torch.linspace(700, 300, batch),
        "context": normal(batch, 1 if video else 77, context or config["context_dim"]),
    }
    if config.get("num_classes"):
        given["y"] = normal(batch, config["adm_in_channels"])
    if video:
        given |= {"num_video_frames": FRAMES, "image_only_indicator": torch.zeros(batch // FRAMES, FRAMES)}
    return given


def cascade(name: str, rows: int, columns: int, batch: int = 1, **more: Any) -> Inputs:
    normal = _normal(rows, columns)
    given: Inputs = {"x": normal(batch, 4, rows, columns), "r": torch.linspace(0.7, 0.3, batch)}
    if name == "stage B":
        given |= {"effnet": normal(batch, 5, 3, 4), "clip": normal(batch, 1, 24)}
        return given | ({"pixels": normal(batch, 3, 8, 8)} if more.get("pixels") else {})
    given |= {"clip_text": normal(batch, 7, 24), "clip_text_pooled": normal(batch, 1, 24)}
    given |= {"clip_img": normal(batch, 1, 20), "sca": torch.zeros(batch), "crp": torch.zeros(batch)}
    if more.get("control"):  # of a ControlNet, at sizes of its own
        given["control"] = {"input": [None, normal(batch, 48, 5, 6), normal(batch, 48, 5, 6), None, None, None]}
    return given


def _normal(rows: int, columns: int) -> Any:
    dice = torch.Generator().manual_seed(rows * 1000 + columns)
    return lambda *shape: torch.randn(shape, generator=dice)
