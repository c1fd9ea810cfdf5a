"""Which shares `auto` comes to, by how long each rank computed in real steps. Shares change between runs, and settle: a
shape that is recorded or compiled is worth something."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..specs import ModelSpec, Parallelism, Placement
from .work_shares import in_proportion, work_fractions

log = logging.getLogger(__name__)

BEHIND = 1.05  # times the mean: from there on the slowest rank is waited for
# Seconds of computing in a step: what is shorter says nothing of the device. Workers that have one in common take it
# from each other.
LEAST, LEAST_TOGETHER = 0.02, 0.4
TWICE = 2


Key = tuple[ModelSpec, Parallelism]
Shares = tuple[int, ...]


@dataclass(eq=False)
class _Tried:
    """The shares of one model on one division. How long the slowest rank computes, in means of all: `before` by the
    shares that these replaced, and `settled` where nothing better was found."""

    shares: Shares
    behind: int = 0  # runs in a row
    before: tuple[float, Shares] | None = None
    settled: float = 1.0

    def ran(self, slowest: float, better: Shares) -> None:
        """By these shares; from the speeds alone `better` ones would follow. What does not go by shares alone, such as
        whole heads, might have them take turns for ever: those that gained nothing give way to the last, which stay."""
        self.behind = self.behind + 1 if slowest > BEHIND * self.settled else 0
        if self.behind < TWICE:
            return
        self.behind = 0
        if self.before is not None and slowest >= self.before[0]:
            self.settled, self.shares = self.before
            self.before = None
        else:
            self.before, self.shares, self.settled = (slowest, self.shares), better, 1.0


class ShareBalance:
    """Of one group, as long as it lives."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tried: dict[Key, _Tried] = {}

    def begin(self, model: ModelSpec, degrees: Parallelism) -> None:
        """A run of this model begins whose shares nobody has chosen."""
        if degrees.pipeline_degree == 1:
            self._tried.setdefault(_key(model, degrees), _Tried(degrees.shares))

    def shares(self, model: ModelSpec) -> dict[Parallelism, Shares]:
        """What the next run of this model has, by its degrees (without shares)."""
        return {degrees: tried.shares for (spec, degrees), tried in self._tried.items() if spec == model.unpatched}

    def learn(self, model: ModelSpec, degrees: Parallelism, seconds: Sequence[float | None]) -> None:
        """How long each rank computed in a step of a run by these degrees, None: it could not say."""
        known = [each for each in seconds if each is not None]
        shares = degrees.shares or (1,) * degrees.world_size
        if not known or len(known) < len(seconds) or max(known) < (LEAST_TOGETHER if self._placement.shared else LEAST):
            return
        tried = self._tried.get(_key(model, degrees))
        if tried is None or not _same(tried.shares, shares):  # somebody chose them
            return
        taking = [each for each, share in zip(known, shares, strict=True) if share]
        slowest, before = max(taking) * len(taking) / sum(taking), tried.shares
        speeds = [work / took if took else 0.0 for work, took in zip(work_fractions(degrees), known, strict=True)]
        tried.ran(slowest, in_proportion(speeds))
        if tried.shares != before:
            log.info(
                "[CP] worker %d computed %.0f %% longer than all on average: from the next run on shares are %s",
                known.index(max(known)), 100 * (slowest - 1), ",".join(map(str, tried.shares)) or "equal",
            )  # fmt: skip


def _key(model: ModelSpec, degrees: Parallelism) -> Key:
    return model.unpatched, replace(degrees, shares=())


def _same(first: Shares, second: Shares) -> bool:
    return (first or (1,) * len(second)) == second
