"""CFG parallelism: the branches that ComfyUI's guidance asks for in one go, spread over groups of ranks.

A wrapper around ComfyUI's `calc_cond_batch`: each lane has ComfyUI evaluate its own branches, whatever their prompt
lengths and areas, and gets the other lanes' predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..lanes import Lanes
from ..pulse import Pulse

Conds = list[list[dict[str, Any]] | None]


class Branches:
    """`together`: every lane evaluates all branches."""

    def __init__(self, lanes: Lanes, pulse: Pulse, *, together: bool = False) -> None:
        self._lanes = lanes
        self._pulse = pulse
        self._together = together

    def __call__(
        self, executor: Any, model: Any, conds: Conds, x: Tensor, timestep: Tensor, model_options: dict[str, Any]
    ) -> list[Tensor]:
        """One denoised prediction [B, C, (T,) H, W] a branch, as `calc_cond_batch` returns them."""
        self._pulse.vote()
        wanted = [index for index, cond in enumerate(conds) if cond is not None]
        if self._together or self._lanes.count == 1 or len(wanted) < 2:
            return executor(model, conds, x, timestep, model_options)
        mine = [wanted[position] for position in self._lanes.mine(len(wanted))]
        ours: Conds = [cond if index in mine else None for index, cond in enumerate(conds)]
        out = executor(model, ours, x, timestep, model_options)
        done = torch.stack([out[index] for index in mine]) if mine else x.new_empty((0, *x.shape))
        for index, prediction in zip(wanted, self._lanes.collect(done, len(wanted)), strict=True):
            out[index] = prediction
        return out
