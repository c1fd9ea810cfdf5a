"""What the blocks of a network cost, and contiguous shares of them that cost about the same. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Load:
    """The cost of a unit to its stage: bytes of weights, and blocks that tokens pass, all of the same cost."""

    nbytes: int
    blocks: int = 1


def share_out(loads: Sequence[Load], stages: int, budget_bytes: Sequence[int] = ()) -> tuple[int, ...]:
    """How many units each stage has, contiguous and at least one, so that the busiest stage has the fewest blocks,
    and of such divisions the fewest bytes. No stage exceeds its entry of `budget_bytes` if that is possible.
    Raises ValueError for more stages than units."""
    if stages > len(loads):
        raise ValueError(f"{len(loads)} blocks make no {stages} stages")
    nbytes_before = tuple(accumulate((load.nbytes for load in loads), initial=0))
    work = tuple(accumulate((load.blocks for load in loads), initial=0))

    def cost(begin: int, end: int, stage: int) -> tuple[int, int, int]:
        nbytes = nbytes_before[end] - nbytes_before[begin]
        return (max(0, nbytes - budget_bytes[stage]) if budget_bytes else 0), work[end] - work[begin], nbytes

    @cache
    def best(end: int, parts: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """The worst of each cost for the first units in this many stages, and where these end."""
        if parts == 1:
            return cost(0, end, 0), (end,)
        divisions = []
        for begin in range(parts - 1, end):
            before, ends = best(begin, parts - 1)
            divisions.append((tuple(map(max, before, cost(begin, end, parts - 1))), (*ends, end)))
        return min(divisions)  # type: ignore[return-value]  # map forgets how many

    _, ends = best(len(loads), stages)
    return tuple(end - begin for begin, end in pairwise((0, *ends)))
