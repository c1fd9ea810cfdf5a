"""Cases that ranks run on the choice of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parallel_runtime.accelerators import FALLBACK, KERNELS
from parallel_runtime.engine.attention import dispatch, registry
from parallel_runtime.engine.attention.context_attention import ContextAttention

from . import cases
from .meshes import mesh, parallelism
from .reference import random_problem


def kernels_taken(
    rank: int,
    world: int,
    degrees: list[int],
    options: dict[str, Any],
    masked: bool,
    works: dict[str, list[str]],
    capabilities: list[int] | None = None,
) -> dict[str, Any]:
    """An attention of two forwards, on ranks where each kernel `works[name][rank]`: "yes", "no" (it raises) or "wrong"
    (it computes something else): the error of this rank's rows, and which kernels attended. FALLBACK attends where
    nothing is chosen. `capabilities` are those of the ranks' GPUs."""
    taken: list[str] = []
    operator = registry.sdpa

    def own(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        taken.append(FALLBACK)
        return operator(q, *(dispatch.repeat_kv(x, q.shape[2]) for x in (k, v)), mask, scale)

    def counted(name: str) -> registry.KernelFunction:
        def attend(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, with_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            if works[name][rank] == "no":
                raise RuntimeError("No available kernel. Aborting execution.")
            taken.append(name)
            off = 0.5 if works[name][rank] == "wrong" else 0.0
            if not with_lse:
                return operator(q, k, v, mask, scale) + off, None
            out, lse = dispatch.attend_block(q, k, v, None, scale, "native")
            return out + off, lse.squeeze(-1).transpose(1, 2)

        return registry.KernelFunction(spec=specs[name], function=attend)

    specs = {name: replace(KERNELS[name], devices=("cpu",), package="", cudnn=False) for name in works}
    place, problem = mesh(*degrees), random_problem(21, masked=masked)
    known = place.context.group_state.working_kernels
    known.clear()
    dispatch._FAILURES.clear()
    with (
        patch.dict(KERNELS, specs),
        patch.dict(registry.FUNCTIONS, {name: counted(name) for name in specs}),
        patch.object(registry.KernelFunction, "unusable_reason", lambda *_: ""),
        patch.object(torch.cuda, "get_device_capability", lambda _: ((capabilities or [9] * world)[rank], 0)),
    ):
        streams = cases.together(problem, place, parallelism(*degrees)).streams
        names = tuple(problem.lengths)
        attention = ContextAttention(place, parallelism(*degrees, **options), streams, names, names, fallback=own)
        q, k, v = (cases.own(tensor, problem, place) for tensor in (problem.query, problem.key, problem.value))
        mask = cases.masked_as(problem, "4d bool", place) if masked else None
        errors = []
        for _ in range(2):
            taken.clear()
            errors.append(cases._compare(attention(q, k, v, mask), problem, place))
    return {"error": max(errors), "taken": taken, "asked": sorted({name for name, *_ in known})}
