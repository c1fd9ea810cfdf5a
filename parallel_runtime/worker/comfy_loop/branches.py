"""Wrappers around ComfyUI's `calc_cond_batch`, which predicts all branches of guidance in one call.

CFG parallelism: each batch group has ComfyUI evaluate its own branches, whatever their prompt lengths and areas, and
gathers the other groups' predictions. A step cache needs them one by one; PipeFusion reads the noise level here.
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

from ...engine.comm.mesh import MeshDim
from ...engine.comm.votes import refuse_on_all_ranks
from ...engine.pipeline.pipefusion import PipeFusion
from ...errors import Refused
from ...jobs import SamplingJob
from ..batch_groups import all_gather, local_items
from ..process.progress import Progress
from ..step_cache import StepCache
from .comfy_model import ComfyModel
from .patcher import RankPatcher

KEY = "context_parallel"
SIGMA_TOLERANCE = 1e-3  # as a share of a step: samplers may compute the same noise level differently

Conds = list[list[dict[str, Any]] | None]


class Branches:
    """A CALC_COND_BATCH wrapper that divides the branches of guidance over batch groups; each group evaluates all of
    them where the job is `batch_coupled`."""

    def __init__(self, model: ComfyModel, job: SamplingJob, progress: Progress) -> None:
        self._entries_per_call = job.entries_per_call
        self._stages = None if job.batch_coupled else model.stages
        self._groups = MeshDim() if job.batch_coupled else model.mesh.cfg
        self._progress = progress

    def __call__(
        self, executor: Any, model: Any, conds: Conds, x: Tensor, timestep: Tensor, model_options: dict[str, Any]
    ) -> list[Tensor]:
        """Returns a denoised prediction [B, C, (T,) H, W] for each branch, as `calc_cond_batch` does."""
        self._progress.vote()
        with _limited_batches(model, x.shape[0] if self._stages else self._entries_per_call):
            return self._evaluate_split(executor, model, conds, x, timestep, model_options)

    def _evaluate_split(self, executor: Any, model: Any, conds: Conds, x: Tensor, *args: Any) -> list[Tensor]:
        branches = [index for index, cond in enumerate(conds) if cond is not None]
        if self._groups.size == 1 or len(branches) < 2:
            return self._evaluate(executor, branches, model, conds, x, *args)
        local = [branches[position] for position in local_items(self._groups, len(branches))]
        local_conds: Conds = [cond if index in local else None for index, cond in enumerate(conds)]
        with refuse_on_all_ranks(self._groups):  # else the others wait in all_gather forever
            out = self._evaluate(executor, local, model, local_conds, x, *args)
        predictions = torch.stack([out[index] for index in local]) if local else x.new_empty((0, *x.shape))
        for index, prediction in zip(branches, all_gather(self._groups, predictions, len(branches)), strict=True):
            out[index] = prediction
        return out

    def _evaluate(self, executor: Any, branches: list[int], *arguments: Any) -> list[Tensor]:
        """Returns the predictions of these branches; in a pipeline, those of its last stage."""
        if self._stages is None or not branches:
            return executor(*arguments)
        with self._stages.in_flight():
            out = executor(*arguments)
            (predictions,) = self._stages.share_outputs([torch.stack([out[index] for index in branches])])
        for index, prediction in zip(branches, predictions, strict=True):
            out[index] = prediction
        return out


@contextmanager
def _limited_batches(model: Any, most: int) -> Iterator[None]:
    """Limits ComfyUI's batches to `most` entries on all ranks; ComfyUI alone would go by each rank's free memory."""
    before = model.memory_required
    if most:
        model.memory_required = lambda shape, *args, **kwargs: 0 if shape[0] <= most else math.inf
    try:
        yield
    finally:
        model.memory_required = before


@contextmanager
def with_step_cache(model: ComfyModel, patcher: RankPatcher) -> Iterator[StepCache | None]:
    """Runs `patcher`, which is loaded, with a step cache, one branch after another. Yields None at step_cache 0."""
    threshold = model.parallelism.options.step_cache
    if not threshold:
        yield None
        return
    assert model.architecture is not None
    if model.stages is not None:
        raise Refused("cache.stages")
    cache = model.cache = StepCache(model.network, model.architecture.plan, model.mesh, threshold)
    if prefetcher := patcher.weight_state.prefetcher:
        prefetcher.is_skipped = cache.skips  # skipped blocks need not be fetched

    def evaluate(
        executor: Any, x: Tensor, t: Tensor, c_concat: Any, c_crossattn: Any, control: Any, options: Any, **conds: Any
    ) -> Tensor:
        window = options.get("context_window")
        indices = () if window is None else tuple(window.index_list)
        # One uuid may be in several branches: ComfyUI gives them copies of a condition that has an area.
        with cache.branch((*options["cond_or_uncond"], *options["uuids"], x.shape, indices)):
            return executor(x, t, c_concat, c_crossattn, control, options, **conds)

    def predict(executor: Any, *arguments: Any) -> Tensor:
        cache.begin_prediction()
        return executor(*arguments)

    patcher.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, predict)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, one_by_one)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, evaluate)
    try:
        with cache.caching():
            yield cache
    finally:
        model.cache = None


def one_by_one(executor: Any, model: Any, conds: list[Any], x: Tensor, *args: Any) -> list[Tensor]:
    """Calls `calc_cond_batch` for one branch after another: in one batch the step cache would decide for all at once,
    unlike with several batch groups."""
    out = [torch.zeros_like(x)] * len(conds)
    for index, cond in enumerate(conds):
        if cond is not None:
            only_this = [cond if position == index else None for position in range(len(conds))]
            out[index] = executor(model, only_this, x, *args)[index]
    return out


@contextmanager
def with_pipefusion(pipefusion: PipeFusion, patcher: ModelPatcher, sigmas: Tensor, warmup_steps: int) -> Iterator[None]:
    """Runs `patcher` at these noise levels with PipeFusion: exact at those of the first `warmup_steps`, and with keys
    and values of this run alone."""
    before, after = sigmas[warmup_steps - 1 : warmup_steps + 1].tolist()
    last_exact = after + SIGMA_TOLERANCE * (before - after)

    def set_exact(executor: Any, inner: Any, conds: list[Any], x: Tensor, sigma: Tensor, *args: Any) -> list[Tensor]:
        pipefusion.exact = pipefusion.exact and bool((sigma.max() - last_exact) * (before - after) > 0)
        return executor(inner, conds, x, sigma, *args)

    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, set_exact)
    pipefusion.reset()
    pipefusion.exact = True
    try:
        yield
    finally:
        pipefusion.reset()
