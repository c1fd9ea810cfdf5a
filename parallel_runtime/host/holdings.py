"""What each worker holds of a model where that is not alike, and why, for CP Plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..specs import Placement, Storage
from .sentences import say
from .storing import Case, Prospect, size_in_words


def weights_of_each(case: Case, way: Prospect, placement: Placement) -> str:
    """Which each has at rest, and of how many blocks."""
    blocks, told = len(case.blocks), []
    for rank, (device, held) in enumerate(zip(_devices(placement), way.held_by(placement.world_size), strict=True)):
        told.append(f"{device} {size_in_words(held)} ({way.storage.resident_on(rank)}/{blocks})")
    return ", ".join(told)


def why_elsewhere(case: Case, way: Prospect, placement: Placement) -> str:
    """Which devices whole weights would fit, and which not; "" where they are whole, or fit all or none."""
    whole = case.one_by_one
    each = zip(_devices(placement), case.room, whole.needed(whole.prospect(Storage())), strict=True)
    rooms = list(each)
    fitting = [device for device, room, needed in rooms if room is None or needed <= room]
    if not way.fetched_bytes or len(fitting) in (0, len(rooms)):
        return ""
    device, room, needed = next(one for one in rooms if one[1] is not None and one[2] > one[1])
    sizes = {"needed": size_in_words(needed), "room": size_in_words(room or 0)}
    return say("weights.why", fitting=", ".join(fitting), device=device, **sizes)


def memory_of_each(placement: Placement, needed: Sequence[int], free: Sequence[int]) -> str:
    """What each needs at its peak, of what is free."""
    told = [f"{device} {size_in_words(size)}" for device, size in zip(_devices(placement), needed, strict=True)]
    if not free:
        return say("memory.each.unknown", each=", ".join(told))
    each = (f"{one} / {size_in_words(room)}" for one, room in zip(told, free, strict=True))
    return say("memory.each", each=", ".join(each))


def _devices(placement: Placement) -> list[str]:
    """Of each rank."""
    machines = ["", *(f" of machine {number}" for number in range(2, placement.nnodes + 1))]
    return [f"{device}{machine}" for machine in machines for device in placement.devices]
