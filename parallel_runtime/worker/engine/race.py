"""Which of several kernels is fastest on these machines for the sizes at hand: timed once, agreed on by the ranks.

Knows no kernel. What was found is kept as long as the group lives, and told by `results`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...wire.readings import Race, RacedFor
from .exchange import gather
from .masks import ToldApart
from .mesh import Axis, World

REPEATS = 3
RUNS = 4  # between two looks at the clock
_LEAD = 4096  # rows of products that keep the device busy while runs are launched

log = logging.getLogger(__name__)

Seconds = Callable[[str], float]  # of one run of the kernel of this name; infinite where it has none


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the largest attention of any rank. Every rank must say the same: they race together."""

    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    what: RacedFor = "block"
    mask: ToldApart | None = None


def winner(names: Sequence[str], sizes: Sizes, axis: Axis, seconds: Seconds, device: torch.device) -> str:
    """The name whose slowest rank is the fastest. Collective over `axis` for sizes that it has not raced with.

    Who has no kernel on some rank is out. Where a rank measured nothing sensible nothing is known: the first stays.
    """
    times = timed_by_all(names, sizes, axis, seconds, device) if len(names) > 1 else {}
    return min(times, key=times.__getitem__, default=names[0])


def timed_by_all(
    names: Sequence[str], sizes: Sizes, axis: Axis, seconds: Seconds, device: torch.device
) -> dict[str, float]:
    """Seconds of those that every rank has, on the slowest; none where it is not known. Collective as `winner`."""
    entry, found = (sizes, axis.ranks, tuple(names)), axis.world.races
    if entry not in found and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return {}
    if entry not in found:
        measured = [taken if (taken := seconds(name)) > 0 else math.nan for name in names]
        own = torch.tensor(measured, dtype=torch.float32, device=device)
        if axis.size > 1:
            (everybodys,) = gather(own[None], [1] * axis.size, axis).wait()
            own = everybodys.amax(dim=0)  # not a number where any is not
        found[entry] = _sensible(dict(zip(names, own.tolist(), strict=True)), axis)
        if axis.index == 0 and len(found[entry]) > 1:
            log.warning("[CP] kernels: %s", _result(sizes, found[entry]))  # a worker's log begins with warnings
    return found[entry]


def _sensible(times: dict[str, float], axis: Axis) -> dict[str, float]:
    if any(map(math.isnan, times.values())):
        if axis.index == 0:
            log.warning("[CP] kernels were timed as %s: nothing sensible, so none of them is preferred", times)
        return {}
    return {name: seconds for name, seconds in times.items() if math.isfinite(seconds)}


def results(world: World) -> tuple[Race, ...]:
    """Of all races so far, the last one last."""
    return tuple(_result(sizes, times) for (sizes, _, _), times in world.races.items() if len(times) > 1)


def _result(sizes: Sizes, times: dict[str, float]) -> Race:
    names = sorted(times, key=times.__getitem__)
    return Race(described(sizes), tuple(names), tuple(round(1e6 * times[name], 1) for name in names), sizes.what)


def described(sizes: Sizes) -> str:
    """For people."""
    batch = f"{sizes.batch} x " if sizes.batch > 1 else ""
    masked = "" if sizes.mask is None else ", masked"
    dtype = str(sizes.dtype).removeprefix("torch.")
    return (
        f"{batch}{sizes.queries} queries x {sizes.keys} keys, {sizes.heads} heads of {sizes.head_dim}, {dtype}{masked}"
    )


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some runs on an accelerator, after one that warms up. Of the device: the host launches
    ahead of it, as it does where a graph is replayed."""
    run()
    lead = torch.zeros(_LEAD, _LEAD, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        for _ in range(RUNS):
            torch.mm(lead, lead)
        begin.record()
        for _ in range(RUNS):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / RUNS)
    return min(times)


def made_up(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and a mask to race with. Of whole keys they lie together, as what arrives over Ulysses."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = (sizes.queries, sizes.keys, sizes.keys)
    shape = (sizes.batch, sizes.heads, sizes.head_dim)
    options: Any = {"dtype": sizes.dtype, "device": device, "generator": generator}
    if sizes.what == "whole" and sizes.queries == sizes.keys:
        together = torch.randn(sizes.keys, sizes.batch, 3 * sizes.heads, sizes.head_dim, **options)
        q, k, v = together.transpose(0, 1).split(sizes.heads, 2)
    else:
        q, k, v = (torch.randn(count, *shape, **options).transpose(0, 1) for count in tokens)
    return q, k, v, _made_up_mask(sizes, device)


def _made_up_mask(sizes: Sizes, device: torch.device) -> Tensor | None:
    """Every seventh key is hidden, from every query."""
    if sizes.mask is None:
        return None
    dtype, *apart = sizes.mask
    dims = (sizes.batch, sizes.heads, sizes.queries)
    shape = [size if told else 1 for size, told in zip(dims, apart, strict=True)]
    hidden = (torch.arange(sizes.keys, device=device) % 7 == 0).expand(*shape, sizes.keys)
    if dtype == torch.bool:
        return ~hidden
    return torch.zeros(*shape, sizes.keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
