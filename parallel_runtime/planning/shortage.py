"""Finds the device that lacks memory for a plan at this moment, from what each rank measured of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Sentence, say
from ..specs import Placement
from ..wire.readings import Readings
from .misfit import size_in_words


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A device on which `ranks` together need `needed` bytes and could have `free`."""

    device: str
    ranks: tuple[int, ...]
    needed: int
    free: int
    limited_by: str = ""

    @property
    def each(self) -> int:
        """Returns the bytes that one rank could have."""
        return max(0, self.free) // len(self.ranks)

    @property
    def sentence(self) -> Sentence:
        needed, free = size_in_words(self.needed, math.ceil), size_in_words(max(0, self.free), math.floor)
        lack = say("memory.lack", needed=needed, device=self.device, free=free)
        return say("memory.lack.limited", lack=lack, limit=self.limited_by) if self.limited_by else lack

    def __str__(self) -> str:
        return self.sentence


def shortage(
    placement: Placement,
    readings: Sequence[Readings],
    fingerprint: str,
    needed: Sequence[int],
    *,
    limits: Sequence[int | None],
    limited_by: str,
) -> Shortage | None:
    """Returns the device that lacks most of the bytes `needed` by its ranks for the model with this `fingerprint`; None
    where all have enough. A rank's memory of this model counts as free, its memory of other models does not. `limits`
    are what each may take of its device, and the only limits of main memory."""
    sharing: dict[str, list[int]] = {}
    for rank, device in enumerate(placement.device_names[: len(readings)]):
        sharing.setdefault(device, []).append(rank)
    shortages = []
    for device, ranks in sharing.items():
        limited = [limit for limit in (limits[rank] for rank in ranks) if limit is not None]
        limit = sum(limited) if len(limited) == len(ranks) else None
        free = _free(device, [readings[rank] for rank in ranks], fingerprint, limit)
        total = sum(needed[rank] for rank in ranks)
        if free is not None and free < total:
            by = limited_by if limit is not None else ""
            shortages.append(Shortage(device=device, ranks=tuple(ranks), needed=total, free=free, limited_by=by))
    return max(shortages, key=lambda one: one.needed - one.free, default=None)


def _free(device: str, ranks: Sequence[Readings], fingerprint: str, limit: int | None) -> int | None:
    """Returns the bytes that these ranks together could have of their device for this model; None if unknown."""
    other_models = sum(each.other_models_bytes(fingerprint) for each in ranks)
    known = [] if limit is None else [limit - other_models]
    if not device.startswith("cpu"):
        known.append(min(each.free_bytes for each in ranks) + sum(each.rank_bytes for each in ranks) - other_models)
    return min(known, default=None)
