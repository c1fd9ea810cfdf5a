"""Chooses the workers that have a text encoder: arithmetic on bytes.

Whole on the one with the most room, else in stages, else on one that fetches blocks from main memory: beside the models
that are loaded if any of these fits there, else in their place. Example: of 12 GiB in 6 equal blocks two workers have
three each, with 8 GiB beside the network; with 5 GiB, one fetches all, in turn, into two buffers of 2 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..architectures.architecture import Load, share_out
from ..errors import Refused, say
from ..specs import BLOCK_BUFFERS, WeightPlacement
from .misfit import size_in_words
from .run_plan import REPLICATED


@dataclass(frozen=True, kw_only=True)
class EncoderSize:
    """The bytes of a text encoder: of its large `layers` and its `blocks` (the units of `encoder_units`), of all other
    weights, and of its activations. `staged`: may its units be on several workers?"""

    layers: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    other: int = 0
    workspace: int = 0
    staged: bool = True

    @property
    def weights(self) -> int:
        return sum(self.layers) + sum(self.blocks) + self.other


@dataclass(frozen=True, kw_only=True)
class EncoderPlacement:
    """The `ranks` that have a text encoder, the units of each (`stages`, () for one rank, which has all), and where the
    weights are between prompts; with the bytes of each of these ranks. `beside`: the models that are loaded stay."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...] = ()
    weights: WeightPlacement = REPLICATED
    weight_bytes: tuple[int, ...]
    buffer_bytes: int = 0
    beside: bool = True


def place_encoder(
    size: EncoderSize, beside: Sequence[int | None], budgets: Sequence[int | None], limited_by: str = ""
) -> EncoderPlacement:
    """Returns the first placement that fits into the room of each worker `beside` the models that are loaded, else into
    its budget. None is no limit. Raises Refused where it fits nowhere."""
    for rooms in (beside, budgets):
        known = [math.inf if room is None else room for room in rooms]
        for placement in _placements(size, known):
            needed = (each + placement.buffer_bytes + size.workspace for each in placement.weight_bytes)
            if all(each <= known[rank] for rank, each in zip(placement.ranks, needed, strict=True)):
                return replace(placement, beside=rooms is beside)
    raise Refused(
        "clip.misfit",
        needed=size_in_words(size.weights + size.workspace, math.ceil),
        free=size_in_words(max(known), math.floor),
        limit=say("memory.limited", limit=limited_by) if limited_by else "",
    )


def _placements(size: EncoderSize, rooms: Sequence[float]) -> Iterator[EncoderPlacement]:
    by_room = sorted(range(len(rooms)), key=lambda rank: -rooms[rank])
    first = by_room[0]
    yield EncoderPlacement(ranks=(first,), weight_bytes=(size.weights,))
    units = [*(Load(each, 0) for each in size.layers), *map(Load, size.blocks)]
    for workers in range(2, len(rooms) + 1) if size.staged else ():
        if workers <= len(units) and rooms[by_room[workers - 1]] > size.other + size.workspace:
            yield _staged(size, units, sorted(by_room[:workers]), rooms)
    if len(size.blocks) > BLOCK_BUFFERS:
        yield _offloaded(size, first, rooms[first])


def _staged(size: EncoderSize, units: Sequence[Load], ranks: Sequence[int], rooms: Sequence[float]) -> EncoderPlacement:
    """Returns stages that are as equal as each worker's room allows."""
    free = [int(min(rooms[rank], size.weights + size.other + size.workspace)) for rank in ranks]
    stages = share_out(units, len(ranks), [each - size.other - size.workspace for each in free])
    ends = [sum(stages[: number + 1]) for number in range(len(stages))]
    parts = [units[end - count : end] for end, count in zip(ends, stages, strict=True)]
    weight_bytes = tuple(size.other + sum(unit.nbytes for unit in part) for part in parts)
    return EncoderPlacement(ranks=tuple(ranks), stages=stages, weight_bytes=weight_bytes)


def _offloaded(size: EncoderSize, rank: int, room: float) -> EncoderPlacement:
    """Returns an offload with as many blocks on the device as fit, by the largest; without any, large layers are
    fetched too."""
    largest, buffers = sorted(size.blocks, reverse=True), BLOCK_BUFFERS * max(size.blocks)
    free, resident = room - size.workspace - buffers - size.other - sum(size.layers), 0
    while resident < len(largest) - BLOCK_BUFFERS - 1 and largest[resident] <= free:
        free -= largest[resident]
        resident += 1
    kept = sum(size.layers) + sum(largest[:resident]) if resident else 0
    return EncoderPlacement(
        ranks=(rank,),
        weights=WeightPlacement(mode="offload", resident_blocks=resident),
        weight_bytes=(size.other + kept,),
        buffer_bytes=buffers + (0 if resident else max(size.layers, default=0)),
    )
