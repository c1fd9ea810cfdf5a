"""Which devices a run has where nobody names any and they are not alike: all, or without those that hold the others up
or have no room for the model. By estimated seconds: arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..errors import Refused
from ..specs import Division, Placement
from .choosing import choose
from .cost import Link, Work, alone_seconds, coarse
from .planning import Wish, plan
from .sentences import Said, listed, say
from .storing import ALIKE, Capacity, Case, decide
from .unlike import WORTH_SAYING, are_known, are_unlike, by_speed, together

TOLD = 4  # other ways, the best ones


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a run could have, as a `wish` says: the seconds of evaluating all prompts, infinite where weights have no
    place; `without` are the devices that it leaves out."""

    wish: Wish
    division: Division
    seconds: float
    without: tuple[str, ...] = ()


class Staffing:
    """What one process has learnt of its devices: what they measured when all of them met, and which of them auto
    uses. Others than these are started only where they are better by more than an estimate's noise."""

    def __init__(self) -> None:
        self._links: dict[Placement, Link] = {}
        self._used: dict[Placement, Placement] = {}

    def learn(self, placement: Placement, link: Link) -> None:
        """What these workers measured when they met."""
        self._links[placement] = link

    def measured(self, placement: Placement) -> Link | None:
        return self._links.get(placement)

    def usual(self, placement: Placement) -> Placement:
        """Those of all these devices that auto used last."""
        return self._used.get(placement, placement)

    def best(self, found: Sequence[Way], live: Placement | None) -> Way:
        """The fastest of these ways, the first of which has all devices; what lives stays where it is hardly slower."""
        there = {way.division.placement: way for way in reversed(found)}
        here = there.get(live, found[0]) if live is not None else found[0]
        quickest = min(found, key=lambda way: way.seconds)
        taken = quickest if quickest.seconds < WORTH_SAYING * here.seconds else here
        self._used[found[0].division.placement] = taken.division.placement
        return taken


def may_leave_out(wish: Wish) -> bool:
    """Has nobody said which devices, how many in each group, or what each of them gets?"""
    asked = wish.request
    named = asked.devices.strip(" ,") or asked.ring_degree or asked.ulysses_degree or asked.cfg_degree
    alone = asked.data_degree == asked.pipeline_degree == asked.nnodes == 1
    return not named and alone and asked.shares.strip() in ("", "auto") and not wish.whole


def ways(wish: Wish, work: Work, link: Link | None, capacity: Capacity) -> list[Way]:
    """All devices first, then others where they are not alike; `link` and `capacity` are of all of them. Raises Refused
    where the wish cannot be honoured."""
    division = plan(wish)
    devices = division.placement.devices
    if not may_leave_out(wish) or len(devices) == 1:
        return [Way(wish=wish, division=division, seconds=0.0)]
    found = [_way(wish, work, link, capacity, range(len(devices)))]
    whole = found[0].seconds < math.inf and found[0].division.storage.mode == "replicate"
    unlike = link is not None and are_unlike(work, found[0].division.placement, link)
    if whole and not unlike:
        return found
    if unlike and work.prompts > 1:
        other = 3 - found[0].division.degrees.cfg_degree
        with suppress(Refused):
            arranged = replace(wish, request=replace(wish.request, cfg_degree=other))
            way = _way(arranged, work, link, capacity, range(len(devices)))
            found += [way] if way.division.degrees.cfg_degree == other else []
    for kept in _subsets(len(devices), _orders(work, link if unlike else None, capacity)):
        with suppress(Refused):
            found.append(_way(wish, work, link, capacity, kept, devices))
    return found


def in_words(found: Sequence[Way], taken: Way) -> tuple[str, ...]:
    """For CP Plan: the seconds of the way that was taken, and of the best others; none where there was no choice."""
    others = sorted((way for way in found if way is not taken), key=lambda way: (way is not found[0], way.seconds))
    told = [said for way in others[:TOLD] if (said := _told(way, found[0])) is not None]
    if not told or not (taken.seconds or math.inf in [way.seconds for way in found]):
        return ()
    names = listed(told)
    measured = say("unlike", seconds=_seconds(taken), others=names)
    first = measured if taken.seconds else say("unlike.unmeasured", others=names)
    return (first, say("unlike.left", devices=", ".join(taken.without))) if taken.without else (first,)


def _told(way: Way, all_devices: Way) -> Said | None:
    """One that was not taken."""
    if way.seconds == math.inf:
        return say("unlike.nowhere") if way is all_devices else None
    if way.without:
        return say("unlike.without", device=", ".join(way.without), seconds=_seconds(way))
    if way.division.degrees.cfg_degree == 2:
        return say("unlike.halves", seconds=_seconds(way))
    return say("unlike.tokens", seconds=_seconds(way))


def _seconds(way: Way) -> str:
    return f"{way.seconds:.2f}"


def _orders(work: Work, link: Link | None, capacity: Capacity) -> Iterator[Sequence[int]]:
    """Ranks in which they may be left out: the slowest first, and those with the least room."""
    if link is not None:
        alone = [alone_seconds(work, speed) for speed in link.ranks]
        yield sorted(range(len(alone)), key=lambda rank: -alone[rank])
    rooms = capacity.ranks
    if rooms and max(rooms) > ALIKE * min(rooms):
        yield sorted(range(len(rooms)), key=lambda rank: rooms[rank])


def _subsets(ranks: int, orders: Iterator[Sequence[int]]) -> list[tuple[int, ...]]:
    """Who stays, each set once."""
    found = {tuple(sorted(order[count:])): None for order in orders for count in range(1, ranks)}
    return list(found)


def _way(
    wish: Wish,
    work: Work,
    link: Link | None,
    capacity: Capacity,
    kept: Sequence[int],
    devices: Sequence[str] = (),
) -> Way:
    """With these of the `devices`, none: all of them."""
    if devices:
        wish = replace(wish, request=replace(wish.request, devices=",".join(devices[rank] for rank in kept)))
        if capacity.ranks:
            rooms = [capacity.ranks[rank] for rank in kept]
            capacity = Capacity.of_each(rooms, host_bytes=capacity.host_bytes, limited_by=capacity.limited_by)
        link = None if link is None else _of(link, kept)
    division = choose(wish, work, link, capacity)
    case = as_balanced(Case(work=work, degrees=division.degrees, capacity=capacity, link=link), division.placement)
    left_out = tuple(device for rank, device in enumerate(devices) if rank not in kept)
    try:
        way = decide(wish.request.weights, case)
    except Refused:
        return Way(wish=wish, division=division, seconds=math.inf, without=left_out)
    turns = case.prompts if way.rows else 1
    fits = case.fits(way, usable=1.0)
    division = replace(division, storage=way.storage, rows=way.rows)
    return Way(wish=wish, division=division, seconds=turns * way.seconds if fits else math.inf, without=left_out)


def _of(link: Link, kept: Sequence[int]) -> Link:
    """What these of the ranks measured."""
    if not link.ranks:
        return link
    ranks = tuple(link.ranks[rank] for rank in kept)
    return replace(link, ranks=ranks, flops_per_second=coarse(min(speed.products for speed in ranks)))


def as_balanced(case: Case, placement: Placement) -> Case:
    """With shares, where these cards are not alike, and a speed as they come to."""
    work, link, degrees = case.work, case.link, case.degrees
    if link is None or not are_known(work, placement, link) or degrees.pipeline_degree > 1:
        return case
    if are_unlike(work, placement, link) and degrees.context_parallel_size > 1:
        degrees = replace(degrees, shares=by_speed(work, link))
    return replace(case, degrees=degrees, link=together(work, degrees, link))
