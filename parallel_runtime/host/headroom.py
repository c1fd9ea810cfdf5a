"""Whether what a run needs has room on its devices at this moment, by what each rank says of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..specs import Placement
from ..wire.readings import Readings
from .storing import size_in_words


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A device on which `ranks` need so many bytes, and could have `free`, all of them together."""

    device: str
    ranks: tuple[int, ...]
    needed: int
    free: int
    limited_by: str = ""

    @property
    def each(self) -> int:
        """What a rank could have."""
        return max(0, self.free) // len(self.ranks)

    def __str__(self) -> str:
        by = f", as {self.limited_by} says" if self.limited_by else ""
        return (
            f"{size_in_words(self.needed, math.ceil)} are needed on {self.device}, and "
            f"{size_in_words(max(0, self.free), math.floor)} are free there{by}"
        )


def shortage(
    placement: Placement,
    readings: Sequence[Readings],
    model: str,
    needed: Sequence[int],
    *,
    limits: Sequence[int | None],
    limited_by: str,
) -> Shortage | None:
    """The device that lacks most of the bytes that its ranks need for `model`, each so many as `needed` says; None
    where there is room. What a rank has of this model already counts as free, what it has of others does not. `limits`
    are what each may take of its device. Main memory has none but that.
    """
    sharing: dict[str, list[int]] = {}
    for rank, device in enumerate(placement.each[: len(readings)]):
        sharing.setdefault(device, []).append(rank)
    found = []
    for device, ranks in sharing.items():
        limited = [limit for limit in (limits[rank] for rank in ranks) if limit is not None]
        limit = sum(limited) if len(limited) == len(ranks) else None
        free = _free(device, [readings[rank] for rank in ranks], model, limit)
        total = sum(needed[rank] for rank in ranks)
        if free is not None and free < total:
            by = limited_by if limit is not None else ""
            found.append(Shortage(device=device, ranks=tuple(ranks), needed=total, free=free, limited_by=by))
    return max(found, key=lambda one: one.needed - one.free, default=None)


def _free(device: str, ranks: Sequence[Readings], model: str, limit: int | None) -> int | None:
    """What these ranks could have of their device for this model, of a `limit` for all of them; None where nothing
    says."""
    others = sum(told.others_bytes(model) for told in ranks)
    known = [] if limit is None else [limit - others]
    if not device.startswith("cpu"):
        known.append(min(told.free_bytes for told in ranks) + sum(told.own_bytes for told in ranks) - others)
    return min(known, default=None)
