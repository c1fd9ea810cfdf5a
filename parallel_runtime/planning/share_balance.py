"""Learns the shares of `auto` from how long each rank computed in real steps. Shares change only between runs, and
settle: another share is another shape, to be recorded or compiled anew."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..specs import ModelSpec, Parallelism, Placement
from .work_shares import in_proportion, work_fractions

log = logging.getLogger(__name__)

MIN_IMBALANCE = 1.05  # the slowest rank's time in means of all ranks, from which the others wait for it
# Computing times of a step in seconds; shorter ones say nothing of the device, which several workers may share.
MIN_STEP_SECONDS, MIN_STEP_SECONDS_SHARED_DEVICE = 0.02, 0.4
RUNS_BEFORE_CHANGE = 2

Key = tuple[ModelSpec, Parallelism]
Shares = tuple[int, ...]


@dataclass(eq=False)
class _Tried:
    """The shares of one model by its degrees. An imbalance is the slowest rank's time in means of all ranks:
    `previous` is that before the last change, with its shares, and `accepted_imbalance` could not be improved."""

    shares: Shares
    behind: int = 0  # runs in a row
    previous: tuple[float, Shares] | None = None
    accepted_imbalance: float = 1.0

    def ran(self, slowest: float, better: Shares) -> None:
        """Notes a run by these shares; `better` ones would follow from the speeds only. Shares that gained nothing
        give way to the last ones, which stay: where work is not in proportion to shares (whole heads), two might
        alternate forever."""
        self.behind = self.behind + 1 if slowest > MIN_IMBALANCE * self.accepted_imbalance else 0
        if self.behind < RUNS_BEFORE_CHANGE:
            return
        self.behind = 0
        if self.previous is not None and slowest >= self.previous[0]:
            self.accepted_imbalance, self.shares = self.previous
            self.previous = None
        else:
            self.previous, self.shares, self.accepted_imbalance = (slowest, self.shares), better, 1.0


class ShareBalance:
    """The learnt shares of one group, for as long as it lives."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tried: dict[Key, _Tried] = {}

    def begin(self, model: ModelSpec, degrees: Parallelism) -> None:
        """Notes that a run of this model begins whose shares the user left to auto."""
        if degrees.pipeline_degree == 1:
            self._tried.setdefault(_key(model, degrees), _Tried(degrees.shares))

    def shares(self, model: ModelSpec) -> dict[Parallelism, Shares]:
        """Returns the shares of the next run of this model, by its degrees (without shares)."""
        return {degrees: tried.shares for (spec, degrees), tried in self._tried.items() if spec == model.unpatched}

    def learn(self, model: ModelSpec, degrees: Parallelism, seconds: Sequence[float | None]) -> None:
        """Takes the seconds that each rank computed in a step of a run by these degrees; None if it could not
        measure."""
        known = [each for each in seconds if each is not None]
        shares = degrees.shares or (1,) * degrees.world_size
        least = MIN_STEP_SECONDS_SHARED_DEVICE if self._placement.shared else MIN_STEP_SECONDS
        if not known or len(known) < len(seconds) or max(known) < least:
            return
        tried = self._tried.get(_key(model, degrees))
        if tried is None or (tried.shares or (1,) * len(shares)) != shares:  # the user chose them
            return
        taking = [each for each, share in zip(known, shares, strict=True) if share]
        slowest, before = max(taking) * len(taking) / sum(taking), tried.shares
        speeds = [work / took if took else 0.0 for work, took in zip(work_fractions(degrees), known, strict=True)]
        tried.ran(slowest, in_proportion(speeds))
        if tried.shares != before:
            log.info(
                "[CP] worker %d computed %.0f %% longer than the average: from the next run on shares are %s",
                known.index(max(known)), 100 * (slowest - 1), ",".join(map(str, tried.shares)) or "equal",
            )  # fmt: skip


def _key(model: ModelSpec, degrees: Parallelism) -> Key:
    return model.unpatched, replace(degrees, shares=())
