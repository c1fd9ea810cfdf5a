"""A run in patches: its first steps are exact, and keys and values are those of this run alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from .model import ComfyModel

KEY = "warming"
NEAR = 1e-3  # of a step, up or down: samplers may come to a noise level by another way


@contextmanager
def in_patches(model: ComfyModel, patcher: ModelPatcher, sigmas: Tensor, steps: int) -> Iterator[None]:
    """One run with `patcher` and these noise levels goes in here. At those of the first `steps` it is exact."""
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
