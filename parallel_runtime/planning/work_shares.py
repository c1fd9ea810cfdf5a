"""Shares of the work for each worker: those of a CP Parallel Config, or whole numbers in proportion to measurements.

Those of `auto` are learnt from how long each rank computed in real steps. Shares change only between runs, and
settle: another share is another shape, to be recorded or compiled anew."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..errors import Refused, quoted
from ..specs import ModelSpec, Parallelism, Placement

PARTS = 64  # for each worker
DIGITS = 9  # of one, at most
log = logging.getLogger(__name__)
MIN_IMBALANCE = 1.05  # the slowest rank's time in means of all ranks, from which the others wait for it
# Computing times of a step in seconds; shorter ones say nothing of the device, which several workers may share.
MIN_STEP_SECONDS, MIN_STEP_SECONDS_SHARED_DEVICE = 0.02, 0.4
RUNS_BEFORE_CHANGE = 2
Key = tuple[ModelSpec, Parallelism]
Shares = tuple[int, ...]


def requested_shares(shares: str, workers: int, devices: int = 0, nnodes: int = 1) -> tuple[int, ...]:
    """Returns the share of each of this many workers, in rank order; () where `shares` leaves them to auto. Numbers may
    be one for each of a config's `devices` on each machine, of which workers have the first. Raises Refused."""
    if are_automatic(shares):
        return ()
    if shares.strip() == "equal":
        return (1,) * workers
    numbers, every, local = _numbers(shares), devices * nnodes, workers // nnodes
    if not numbers:
        raise Refused("shares.text", "shares", {"shares": "auto"}, shares=quoted(shares))
    if len(numbers) == workers:
        return numbers
    if len(numbers) != every or local > devices:
        text = quoted(shares.strip())
        raise Refused("shares.count", "shares", {"shares": "auto"}, shares=text, count=len(numbers), workers=workers)
    return tuple(number for machine in range(nnodes) for number in numbers[machine * devices :][:local])


def are_automatic(shares: str) -> bool:
    """Are these shares left to auto?"""
    return shares.strip() in ("", "auto")


def are_uneven(shares: str) -> bool:
    """Are these shares numbers that are not all equal?"""
    return len(set(_numbers(shares))) > 1


def _numbers(shares: str) -> tuple[int, ...]:
    """Returns the comma-separated whole numbers; () for other text."""
    words = [word.strip() for word in shares.split(",")]
    known = all(word.isascii() and word.isdecimal() and len(word) <= DIGITS for word in words)
    return tuple(map(int, words)) if known else ()


def shares_have_no_effect(degrees: Parallelism) -> bool:
    """Do the shares differ only between the groups of cfg_degree, which have a prompt each whatever their shares?"""
    even = all(len(set(shares)) == 1 for shares in degrees.cp_group_shares)
    return len(set(degrees.shares)) > 1 and even and len(set(degrees.data_group_shares)) == 1


def in_proportion(to: Sequence[float]) -> tuple[int, ...]:
    """Returns whole numbers in proportion to these, about PARTS for each worker; a positive number stays positive."""
    mean = sum(to) / len(to)
    sizes = [max(round(PARTS * one / mean), int(one > 0)) for one in to]
    common = gcd(*sizes)
    return tuple(size // common for size in sizes)


def shares_within(total: int, budget_bytes: Sequence[int | None]) -> tuple[int, ...]:
    """Returns shares of what takes `total` bytes on all workers together: equal, but none above its budget (None: no
    limit); where all budgets are too small, in proportion to them. () where all are equal."""
    limits = sorted(total if budget is None else max(0, budget) for budget in budget_bytes)
    remaining, level = total, 0.0
    for number, limit in enumerate(limits):
        level = remaining / (len(limits) - number)
        if limit >= level:
            break
        remaining -= limit
    if limits[0] >= level or not limits[-1]:
        return ()
    return in_proportion([level if budget is None else min(max(0, budget), level) for budget in budget_bytes])


def work_percent(degrees: Parallelism, placement: Placement) -> list[tuple[str, int]]:
    """Returns each worker's device with its share of all the work in percent."""
    devices = placement.devices * placement.nnodes
    return [(device, round(100 * part)) for device, part in zip(devices, work_fractions(degrees), strict=True)]


def work_fractions(degrees: Parallelism) -> list[float]:
    """Returns each worker's fraction of all the work."""
    # Of different prompts ranks have equal parts whatever their shares, of different images parts in proportion.
    groups = degrees.data_group_shares
    return [
        share / sum(shares) / degrees.cfg_degree * groups[number // degrees.cfg_degree % len(groups)] / sum(groups)
        for number, shares in enumerate(degrees.cp_group_shares)
        for share in shares
    ]


@dataclass(eq=False)
class _Tried:
    """The shares of one model by its degrees. An imbalance is the slowest rank's time in means of all ranks:
    `previous` is that before the last change, with its shares, and `accepted_imbalance` could not be improved."""

    shares: Shares
    behind: int = 0  # runs in a row
    previous: tuple[float, Shares] | None = None
    accepted_imbalance: float = 1.0

    def ran(self, slowest: float, better: Shares) -> None:
        """Notes a run by these shares; `better` ones would follow from the speeds only."""
        # Shares that gained nothing give way to the last ones, which stay: where work is not in proportion to shares
        # (whole heads), two might alternate forever.
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
        """Takes the seconds that each rank computed in a step by these degrees; None if it could not measure."""
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
