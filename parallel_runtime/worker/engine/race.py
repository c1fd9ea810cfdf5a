"""Which of several kernels is fastest on these machines for the sizes at hand: timed once, agreed on by the ranks.

Knows no kernel. What was found is kept as long as the process lives, and told by `results`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...wire.readings import Race
from .exchange import gather
from .mesh import Axis

REPEATS = 3

Seconds = Callable[[str], float]  # of one run of the kernel of this name


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the largest block that any rank attends to. Every rank must say the same: they race together."""

    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    dtype: torch.dtype


_FOUND: dict[tuple[Sizes, tuple[int, ...], tuple[str, ...]], dict[str, float]] = {}


def winner(names: Sequence[str], sizes: Sizes, axis: Axis, seconds: Seconds, device: torch.device) -> str:
    """The name whose slowest rank is the fastest. Collective over `axis` for sizes that it has not raced with."""
    if len(names) == 1:
        return names[0]
    entry = (sizes, axis.ranks, tuple(names))
    if entry not in _FOUND:
        own = torch.tensor([seconds(name) for name in names], dtype=torch.float32, device=device)
        if axis.size > 1:
            (everybodys,) = gather(own[None], [1] * axis.size, axis).wait()
            own = everybodys.amax(dim=0)
        _FOUND[entry] = dict(zip(names, own.tolist(), strict=True))
    times = _FOUND[entry]
    return min(times, key=times.__getitem__)


def results() -> tuple[Race, ...]:
    """Of all races so far, the last one last."""
    return tuple(_result(sizes, times) for (sizes, _, _), times in _FOUND.items())


def _result(sizes: Sizes, times: dict[str, float]) -> Race:
    names = sorted(times, key=times.__getitem__)
    batch = f"{sizes.batch} x " if sizes.batch > 1 else ""
    return Race(
        f"{batch}{sizes.queries} queries x {sizes.keys} keys, {sizes.heads} heads of {sizes.head_dim}, "
        f"{str(sizes.dtype).removeprefix('torch.')}",
        tuple(names),
        tuple(round(1e6 * times[name], 1) for name in names),
    )


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some runs on an accelerator, after one that warms up."""
    run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def blocks(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Queries and keys to race with."""
    tokens = (sizes.queries, sizes.keys)
    query, key = (
        torch.ones(sizes.batch, count, sizes.heads, sizes.head_dim, dtype=sizes.dtype, device=device)
        for count in tokens
    )
    return query, key
