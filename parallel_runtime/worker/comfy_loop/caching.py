"""First-block caching in ComfyUI's loop: each branch of guidance is evaluated by itself, and the cache told which."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..step_cache import StepCache

KEY = "step_cache"


def cached(cache: StepCache | None, patcher: ModelPatcher) -> AbstractContextManager[None]:
    """One run with `patcher` goes in here."""
    if cache is None:
        return nullcontext()

    def evaluate(
        executor: Any, x: Tensor, t: Tensor, c_concat: Any, c_crossattn: Any, control: Any, options: Any, **conds: Any
    ) -> Tensor:
        # One uuid may be in several branches: ComfyUI gives them copies of a condition that has an area.
        with cache.branch((*options["cond_or_uncond"], *options["uuids"], x.shape)):
            return executor(x, t, c_concat, c_crossattn, control, options, **conds)

    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, one_by_one)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, evaluate)
    return cache.caching()


def one_by_one(executor: Any, model: Any, conds: list[Any], x: Tensor, *rest: Any) -> list[Tensor]:
    """`calc_cond_batch` branch after branch, as several lanes have it too: a batch of all would be one decision."""
    out = [torch.zeros_like(x)] * len(conds)
    for index, cond in enumerate(conds):
        if cond is not None:
            alone = [cond if other == index else None for other in range(len(conds))]
            out[index] = executor(model, alone, x, *rest)[index]
    return out
