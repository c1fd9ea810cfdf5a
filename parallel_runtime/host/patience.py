"""How long the ranks of one request may be silent. Knows neither messages nor processes."""

from __future__ import annotations

import time
from collections.abc import Collection


class Patience:
    """Limits in seconds: `load` while a rank loads or compiles, `stall` before and after.

    Ahead of a cancelled rank is no more than the rest of one step: how long one takes, known after the first, and
    `cancel` on top. Where a rank has refused, those that sample are at the same place, and have `cancel` to say so;
    who does not will wait for that rank for ever.
    """

    def __init__(self, ranks: int, *, load: float, stall: float, cancel: float) -> None:
        self.cancelled = False
        self._load = load
        self._stall = stall
        self._cancel = cancel
        self._heard = [time.monotonic()] * ranks
        self._awake: set[int] = set()
        self._sampling: set[int] = set()
        self._compiling: set[int] = set()
        self._longest_step = 0.0
        self._refused: float | None = None  # when

    def hear(self, rank: int) -> None:
        now = time.monotonic()
        self._awake.add(rank)
        if rank in self._sampling:
            self._longest_step = max(self._longest_step, now - self._heard[rank])
        self._heard[rank] = now

    def sampling(self, rank: int) -> None:
        """This rank has loaded."""
        self._sampling.add(rank)
        self._compiling.discard(rank)

    def compiling(self, rank: int) -> None:
        """This rank has loaded, and hears no cancel until torch.compile is done."""
        self._sampling.discard(rank)
        self._compiling.add(rank)

    def refused(self) -> None:
        """A rank has."""
        self._refused = self._refused or time.monotonic()

    def lost(self, waited_for: Collection[int]) -> tuple[int, float] | None:
        """The rank that the others wait for, and its silence, if any of `waited_for` has been silent for too long."""
        now = time.monotonic()
        if all(now - self._heard[rank] <= self._limit(rank) for rank in waited_for):
            return None
        stuck = min(waited_for, key=lambda rank: self._heard[rank])
        return stuck, now - self._heard[stuck]

    def _limit(self, rank: int) -> float:
        if rank in self._compiling:
            return min(self._stall, self._load) if self.cancelled else self._load
        if rank in self._awake and rank not in self._sampling:
            return min(self._cancel, self._load) if self.cancelled else self._load
        stall = min(self._stall, self._load)
        if self._refused is not None:
            return min(self._cancel, stall) + max(0.0, self._refused - self._heard[rank])
        return min(self._cancel + self._longest_step, stall) if self.cancelled and self._longest_step else stall
