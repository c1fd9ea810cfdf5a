"""CFG parallelism: the branches that ComfyUI's guidance asks for in one go, spread over groups of ranks.

A wrapper around ComfyUI's `calc_cond_batch`: each lane has ComfyUI evaluate its own branches, whatever their prompt
lengths and areas, and gets the other lanes' predictions. In a pipeline they are in flight together, read at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..lanes import Flights, Lanes
from ..pulse import Pulse

Conds = list[list[dict[str, Any]] | None]


class Branches:
    """`together`: every lane evaluates all branches. `rows`: how many ComfyUI may put into one batch, 0 for any."""

    def __init__(
        self, lanes: Lanes, pulse: Pulse, *, together: bool = False, rows: int = 0, stages: Flights | None = None
    ) -> None:
        self._rows = rows
        self._stages = None if together else stages
        self._lanes = lanes
        self._pulse = pulse
        self._together = together

    def __call__(
        self, executor: Any, model: Any, conds: Conds, x: Tensor, timestep: Tensor, model_options: dict[str, Any]
    ) -> list[Tensor]:
        """One denoised prediction [B, C, (T,) H, W] a branch, as `calc_cond_batch` returns them."""
        self._pulse.vote()
        with _batches_of(model, x.shape[0] if self._stages else self._rows):
            return self._shared(executor, model, conds, x, timestep, model_options)

    def _shared(self, executor: Any, model: Any, conds: Conds, x: Tensor, *rest: Any) -> list[Tensor]:
        wanted = [index for index, cond in enumerate(conds) if cond is not None]
        if self._together or self._lanes.count == 1 or len(wanted) < 2:
            return self._evaluated(executor, wanted, model, conds, x, *rest)
        mine = [wanted[position] for position in self._lanes.mine(len(wanted))]
        ours: Conds = [cond if index in mine else None for index, cond in enumerate(conds)]
        with self._lanes.refusing_together():
            out = self._evaluated(executor, mine, model, ours, x, *rest)
        done = torch.stack([out[index] for index in mine]) if mine else x.new_empty((0, *x.shape))
        for index, prediction in zip(wanted, self._lanes.collect(done, len(wanted)), strict=True):
            out[index] = prediction
        return out

    def _evaluated(self, executor: Any, wanted: list[int], *arguments: Any) -> list[Tensor]:
        """The predictions; of a pipeline those of its last stage."""
        if self._stages is None or not wanted:
            return executor(*arguments)
        with self._stages.in_flight():
            out = executor(*arguments)
            (done,) = self._stages.answers([torch.stack([out[index] for index in wanted])])
        for index, prediction in zip(wanted, done, strict=True):
            out[index] = prediction
        return out


@contextmanager
def _batches_of(model: Any, rows: int) -> Iterator[None]:
    """ComfyUI makes the largest batch that its memory has room for: each rank would go by its own."""
    before = model.memory_required
    if rows:
        model.memory_required = lambda shape, *args, **kwargs: 0 if shape[0] <= rows else math.inf
    try:
        yield
    finally:
        model.memory_required = before
