"""Cases that ranks run on the choice of kernels."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parallel_runtime.accelerators import FALLBACK, KERNELS
from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.kernels import autotune, dispatch, registry

from . import cases
from .meshes import mesh, parallelism
from .reference import random_problem

_CPU = torch.device("cpu")


def winners(rank: int, world: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """The fastest of kernels that take `times[name][rank]` seconds, twice; how often one was timed; the results."""
    timed: list[str] = []

    def seconds(name: str) -> float:
        timed.append(name)
        return times[name][rank]

    sizes = autotune.AttentionSizes(batch=1, queries=7, keys=9, heads=2, head_dim=64, dtype=torch.bfloat16)
    mesh_dim = mesh(world, 1).context
    mesh_dim.group_state.kernel_seconds.clear()
    slowest = [autotune.slowest_rank_seconds(list(times), sizes, mesh_dim, seconds, _CPU) for _ in range(2)]
    won = [min(each, key=each.__getitem__, default="") for each in slowest]
    return {
        "won": won,
        "timed": timed,
        "results": [list(astuple(benchmark)[:3]) for benchmark in autotune.benchmark_results(mesh_dim.group_state)],
    }


def kernels_taken(
    rank: int,
    world: int,
    degrees: list[int],
    options: dict[str, Any],
    masked: bool,
    seconds: dict[str, list[float]],
    capability: list[int] | None = None,
    fits: list[bool] | None = None,
) -> dict[str, Any]:
    """An attention whose kernels take `seconds[name][rank]` (none on a rank: it lacks that kernel): the error of this
    rank's rows, which kernels attended, which were timed, and how many benchmarks there were. FALLBACK attends where
    nothing is chosen. `fits`: is each rank's GPU new enough for kernels? If they differ, so do the GPUs."""
    taken: list[str] = []
    operator = registry.sdpa

    def own(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        taken.append(FALLBACK)
        return operator(q, *(dispatch.repeat_kv(x, q.shape[2]) for x in (k, v)), mask, scale)

    def counted(name: str) -> registry.KernelFunction:
        def attend(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, with_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            if seconds[name][rank] < 0:
                raise RuntimeError("No available kernel. Aborting execution.")
            taken.append(name)
            if not with_lse:
                return operator(q, k, v, mask, scale), None
            out, lse = dispatch._cpu(q, k, v, None, scale)
            return out, lse.squeeze(-1).transpose(1, 2)

        return registry.KernelFunction(spec=specs[name], function=attend)

    specs = {
        name: replace(KERNELS[name], devices=("cpu",), package="", benchmark=("full", "block"), cudnn=False)
        for name in seconds
        if name != FALLBACK
    }
    timed: list[str] = []

    def clock(run: Any, _: Any) -> float:
        run()
        timed.append(taken[-1])
        return seconds[taken[-1]][rank]

    place, problem = mesh(*degrees), random_problem(21, masked=masked)
    place.context.group_state.kernel_seconds.clear()
    dispatch._FAILURES.clear()
    with (
        patch.dict(KERNELS, specs),
        patch.dict(registry.FUNCTIONS, {name: counted(name) for name in specs}),
        patch.object(
            registry.KernelFunction, "unusable_reason", lambda *_: "" if fits is None or fits[rank] else "too old"
        ),
        patch.object(place.context.group_state, "heterogeneous", bool(fits and len(set(fits)) > 1)),
        patch.object(autotune, "time_runs", clock),
        patch.object(torch.cuda, "get_device_capability", lambda _: tuple(capability or (8, 0))),
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
    return {
        "error": max(errors),
        "taken": taken,
        "timed": sorted(set(timed)),
        "benchmarks": len(autotune.benchmark_results(place.context.group_state)),
    }
