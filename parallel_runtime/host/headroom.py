"""Whether what a run needs has room on its devices at this moment, by what each rank says of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..specs import Placement
from ..wire.readings import Readings
from .storing import size_in_words


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A device on which `workers` ranks need so many bytes each, and could have `free` together."""

    device: str
    workers: int
    needed: int
    free: int
    limited_by: str = ""

    @property
    def each(self) -> int:
        """What a rank could have."""
        return max(0, self.free) // self.workers

    def __str__(self) -> str:
        needed = size_in_words(self.needed * self.workers)
        by = f", as {self.limited_by} says" if self.limited_by else ""
        return f"{needed} are needed on {self.device}, and {size_in_words(max(0, self.free))} are free there{by}"


def shortage(
    placement: Placement, readings: Sequence[Readings], model: str, needed: int, *, limit: int | None, limited_by: str
) -> Shortage | None:
    """The device that lacks most of the `needed` bytes that each of its ranks takes for `model`; None where there is
    room. What a rank has of this model already counts as free, what it has of others does not. `limit` is what one may
    take of its device. Main memory has none but that.
    """
    sharing: dict[tuple[int, str], list[Readings]] = {}
    for rank, told in enumerate(readings):
        machine, place = divmod(rank, len(placement.devices))
        sharing.setdefault((machine, placement.devices[place]), []).append(told)
    found = [
        Shortage(
            device=f"{device} of machine {machine + 1}" if machine else device,
            workers=len(ranks),
            needed=needed,
            free=free,
            limited_by=limited_by if limit is not None else "",
        )
        for (machine, device), ranks in sharing.items()
        if (free := _free(device, ranks, model, limit)) is not None and free < needed * len(ranks)
    ]
    return max(found, key=lambda one: one.needed * one.workers - one.free, default=None)


def _free(device: str, ranks: Sequence[Readings], model: str, limit: int | None) -> int | None:
    """What these ranks could have of their device for this model; None where nothing says."""
    others = sum(told.others_bytes(model) for told in ranks)
    known = [] if limit is None else [limit * len(ranks) - others]
    if device != "cpu":
        known.append(min(told.free_bytes for told in ranks) + sum(told.own_bytes for told in ranks) - others)
    return min(known, default=None)
