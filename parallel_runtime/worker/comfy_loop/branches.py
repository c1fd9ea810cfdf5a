"""What goes around ComfyUI's `calc_cond_batch`, which is asked for all branches of guidance in one go.

CFG parallelism: each lane has ComfyUI evaluate its own branches, whatever their prompt lengths and areas, and gets the
other lanes' predictions. A step cache has them one by one, and a run in patches hears of its noise levels here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...errors import Refused
from ..pulse import Pulse
from ..step_cache import StepCache
from .model import ComfyModel
from .weights import Weights

KEY = "context_parallel"
NEAR = 1e-3  # of a step, up or down: samplers may come to a noise level by another way

Conds = list[list[dict[str, Any]] | None]


class Branches:
    """`together`: every lane evaluates all branches. `rows`: how many ComfyUI may put into one batch, 0 for any."""

    def __init__(self, model: ComfyModel, pulse: Pulse, *, together: bool = False, rows: int = 0) -> None:
        self._rows = rows
        self._stages = None if together else model.stages
        self._lanes = model.branches
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


@contextmanager
def cached(model: ComfyModel, patcher: Weights, threshold: float) -> Iterator[StepCache | None]:
    """One run with `patcher`, which is loaded, goes in here: each branch by itself, and the cache told which. At
    threshold 0 there is none."""
    if not threshold:
        yield None
        return
    assert model.architecture is not None
    if model.stages is not None:
        raise Refused("step_cache and pipeline_degree: no stage sees all blocks; set one of them to its default")
    cache = model.cache = StepCache(model.network, model.architecture.plan, model.mesh, threshold)
    if store := patcher.merged.store:
        store.skips = cache.skips  # what is skipped need not be fetched

    def evaluate(
        executor: Any, x: Tensor, t: Tensor, c_concat: Any, c_crossattn: Any, control: Any, options: Any, **conds: Any
    ) -> Tensor:
        # One uuid may be in several branches: ComfyUI gives them copies of a condition that has an area.
        with cache.branch((*options["cond_or_uncond"], *options["uuids"], x.shape)):
            return executor(x, t, c_concat, c_crossattn, control, options, **conds)

    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, one_by_one)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, evaluate)
    try:
        with cache.caching():
            yield cache
    finally:
        model.cache = None


def one_by_one(executor: Any, model: Any, conds: list[Any], x: Tensor, *rest: Any) -> list[Tensor]:
    """`calc_cond_batch` branch after branch, as several lanes have it too: a batch of all would be one decision."""
    out = [torch.zeros_like(x)] * len(conds)
    for index, cond in enumerate(conds):
        if cond is not None:
            alone = [cond if other == index else None for other in range(len(conds))]
            out[index] = executor(model, alone, x, *rest)[index]
    return out


@contextmanager
def in_patches(model: ComfyModel, patcher: ModelPatcher, sigmas: Tensor, steps: int) -> Iterator[None]:
    """One run with `patcher` and these noise levels goes in here. At those of the first `steps` it is exact, and keys
    and values are those of this run alone."""
    if (patches := model.patches) is None:
        yield
        return
    before, after = sigmas[steps - 1 : steps + 1].tolist()
    least = after + NEAR * (before - after)

    def watch(executor: Any, inner: Any, conds: list[Any], x: Tensor, sigma: Tensor, *rest: Any) -> list[Tensor]:
        patches.exact = patches.exact and bool((sigma.max() - least) * (before - after) > 0)
        return executor(inner, conds, x, sigma, *rest)

    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, watch)
    patches.forget()
    patches.exact = True
    try:
        yield
    finally:
        patches.forget()
