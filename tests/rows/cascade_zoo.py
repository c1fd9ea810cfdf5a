"""Tiny random stages of Stable Cascade of ComfyUI's own classes. Runs in ComfyUI's python."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..zoo import tiny


@lru_cache(1)
def made(name: str) -> Any:
    return tiny.cascade(name)


def inputs(name: str, rows: int, columns: int, batch: int = 1, **more: Any) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(rows * 1000 + columns)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice)

    given: dict[str, Any] = {"x": normal(batch, 4, rows, columns), "r": torch.linspace(0.7, 0.3, batch)}
    if name == "stage B":
        given |= {"effnet": normal(batch, 5, 3, 4), "clip": normal(batch, 1, 24)}
        return given | ({"pixels": normal(batch, 3, 8, 8)} if more.get("pixels") else {})
    given |= {"clip_text": normal(batch, 7, 24), "clip_text_pooled": normal(batch, 1, 24)}
    given |= {"clip_img": normal(batch, 1, 20), "sca": torch.zeros(batch), "crp": torch.zeros(batch)}
    if more.get("control"):  # of a ControlNet, at sizes of its own
        given["control"] = {"input": [None, normal(batch, 48, 5, 6), normal(batch, 48, 5, 6), None, None, None]}
    return given
