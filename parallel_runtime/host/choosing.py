"""Which division a run gets of those that its request allows, and on which devices: the first that works, the fastest
once workers have measured; all workers on both prompts where their weights ask for it; without devices that hold the
others up or have no room for the model, where nobody names any. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..errors import Refused
from ..specs import Division, Placement, RotateMethod
from .cost import (
    Link,
    Work,
    activation_bytes,
    are_known,
    are_unlike,
    by_speed,
    each_alone,
    evaluation_seconds,
    rotating,
    together,
)
from .pipelines import balanced, check_stages
from .planning import Seconds, Wish, plan
from .sentences import Said, listed, say
from .storing import ALIKE, USABLE, Capacity, Case, auto_seconds, decide, fits_whole, has_place_nearby

TOLD = 4  # other ways, the best ones
CLEARLY = 0.95  # of the seconds that another way takes: what is less apart is an estimate's noise


def choose(wish: Wish, work: Work, link: Link | None, capacity: Capacity) -> Division:
    """For `work`, by estimated speed once the workers have measured their `link`, and by their `capacity`. Raises
    Refused where the wish cannot be honoured."""
    if (division := plan(wish)).degrees.pipeline_degree > 1:
        return _rotated(_in_stages(division, work, capacity), "alltoall")
    if link is None or not link.bytes_per_second:
        return _rotated(division, "alltoall")
    seconds = partial(evaluation_seconds, work, link=link, device_bytes=capacity.device_bytes)
    division = plan(wish, seconds)
    case = partial(Case, work=work, capacity=capacity, link=link)
    if division.degrees.cfg_degree == 2 and not wish.request.cfg_degree:
        division = _together(wish, seconds, division, case(degrees=division.degrees))
    if wish.request.pipeline_degree == 0:
        division = _resorted(wish, division, case(degrees=division.degrees))
    return _rotated(division, rotating(work, division.degrees, link, capacity.device_bytes))


def _resorted(wish: Wish, division: Division, case: Case) -> Division:
    """A pipeline of the same workers, where nothing else has a place for the weights without fetching them over a slow
    link."""
    asked, figures = wish.request, case.work.figures
    stages = division.degrees.world_size // asked.data_degree
    chosen = asked.ring_degree or asked.ulysses_degree or asked.cfg_degree or asked.weights != "auto"
    if chosen or stages == 1 or not figures.divisible or has_place_nearby(case):
        return division
    request = replace(asked, pipeline_degree=stages, ring_degree=1, ulysses_degree=1, cfg_degree=1)
    request = replace(request, devices=",".join(division.placement.devices))
    with suppress(Refused):
        check_stages(request, figures)
        staged = _in_stages(plan(replace(wish, request=request)), case.work, case.capacity)
        if staged.placement == division.placement and fits_whole(replace(case, degrees=staged.degrees)):
            return staged
    return division


def _in_stages(division: Division, work: Work, capacity: Capacity) -> Division:
    """With the blocks that each stage has, by what is left of a device beside what is computed there."""
    beside = activation_bytes(replace(work, prompts=1), division.degrees)
    rooms = capacity.each(division.degrees.world_size)
    return balanced(division, work, [None if room is None else int(USABLE * room) - beside for room in rooms])


def _together(wish: Wish, seconds: Seconds, branches: Division, case: Case) -> Division:
    """Both prompts to all workers where that pays: for weights that fit no device whole, which each half would have a
    copy of; or because one half of unlike cards would wait for the other."""
    as_one, request, link = _as_one(wish, seconds, branches), wish.request, case.link
    if as_one is None:
        return branches
    unlike = request.shares == "auto" and link is not None and are_unlike(case.work, branches.placement, link)
    if not unlike and (request.weights != "auto" or fits_whole(case)):
        return branches
    apart, both = (_balanced(replace(case, degrees=way.degrees), way.placement) for way in (branches, as_one))
    return as_one if auto_seconds(apart) > (1.0 if unlike else ALIKE) * auto_seconds(both) else branches


def _rotated(division: Division, method: RotateMethod) -> Division:
    """With what `auto` comes to."""
    if division.degrees.rotate_method != "auto":
        return division
    return replace(division, degrees=replace(division.degrees, rotate_method=method))


def _as_one(wish: Wish, seconds: Seconds, branches: Division) -> Division | None:
    """Both prompts to each of the workers; None where one sequence has no use for all of them."""
    request = replace(wish.request, cfg_degree=1, devices=",".join(branches.placement.devices))
    with suppress(Refused):
        as_one = plan(replace(wish, request=request), seconds)
        return as_one if as_one.placement == branches.placement else None
    return None


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
        taken = quickest if quickest.seconds < CLEARLY * here.seconds else here
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
    return _all(wish, work, link, capacity, devices)


def beside(wish: Wish, work: Work, link: Link | None, capacity: Capacity) -> list[Way]:
    """What a wish comes to in which somebody has chosen, then what auto would make of the same devices; nothing where
    these are alike."""
    division = plan(wish)
    degrees, placement = division.degrees, division.placement
    unlike = link is not None and link.bytes_per_second and are_unlike(work, placement, link)
    if not unlike or degrees.pipeline_degree * degrees.data_degree * placement.nnodes > 1:
        return []
    free = replace(wish.request, ring_degree=0, ulysses_degree=0, cfg_degree=0, shares="auto")
    free = replace(free, devices=",".join(placement.devices))
    others = _all(replace(wish, request=free), work, link, capacity, placement.devices)
    return [
        _way(wish, work, link, capacity),
        *(way for way in others if way.without or way.division.degrees.cfg_degree != degrees.cfg_degree),
    ]


def _all(wish: Wish, work: Work, link: Link | None, capacity: Capacity, devices: Sequence[str]) -> list[Way]:
    found = [_way(wish, work, link, capacity)]
    whole = found[0].seconds < math.inf and found[0].division.storage.mode == "replicate"
    unlike = link is not None and are_unlike(work, found[0].division.placement, link)
    if whole and not unlike:
        return found
    if unlike and work.prompts > 1:
        other = 3 - found[0].division.degrees.cfg_degree
        with suppress(Refused):
            arranged = replace(wish, request=replace(wish.request, cfg_degree=other))
            way = _way(arranged, work, link, capacity)
            found += [way] if way.division.degrees.cfg_degree == other else []
    for kept in _subsets(len(devices), _orders(work, link if unlike else None, capacity)):
        fewer = replace(wish, request=replace(wish.request, devices=",".join(devices[rank] for rank in kept)))
        left_out = tuple(device for rank, device in enumerate(devices) if rank not in kept)
        with suppress(Refused):
            way = _way(fewer, work, None if link is None else link.of(kept), capacity.of(kept))
            found.append(replace(way, without=left_out))
    return found


def in_words(found: Sequence[Way], taken: Way | None = None) -> tuple[str, ...]:
    """For CP Plan: the seconds of the way that was taken, None: the first, and of the best others; nothing where there
    is no other."""
    if not found:
        return ()
    taken = taken or found[0]
    others = sorted((way for way in found if way is not taken), key=lambda way: (way is not found[0], way.seconds))
    told = [said for way in others[:TOLD] if (said := _told(way, found, taken)) is not None]
    if not told or not (taken.seconds or math.inf in [way.seconds for way in found]):
        return ()
    names = listed(told)
    measured = say("unlike", seconds=_seconds(taken), others=names)
    first = measured if taken.seconds else say("unlike.unmeasured", others=names)
    return (first, say("unlike.left", devices=", ".join(taken.without))) if taken.without else (first,)


def _told(way: Way, found: Sequence[Way], taken: Way) -> Said | None:
    """One that was not taken."""
    if way.seconds == math.inf:
        return say("unlike.nowhere") if way is found[0] else None
    if way.without:
        key = "unlike.leave" if way.seconds < CLEARLY * taken.seconds else "unlike.without"
        return say(key, device=", ".join(way.without), seconds=_seconds(way))
    return say("unlike.halves" if way.division.degrees.cfg_degree == 2 else "unlike.tokens", seconds=_seconds(way))


def _seconds(way: Way) -> str:
    return f"{way.seconds:.2f}"


def _orders(work: Work, link: Link | None, capacity: Capacity) -> Iterator[Sequence[int]]:
    """Ranks in which they may be left out: the slowest first, and those with the least room."""
    if link is not None:
        alone = each_alone(work, link)
        yield sorted(range(len(alone)), key=lambda rank: -alone[rank])
    rooms = capacity.ranks
    if rooms and max(rooms) > ALIKE * min(rooms):
        yield sorted(range(len(rooms)), key=lambda rank: rooms[rank])


def _subsets(ranks: int, orders: Iterator[Sequence[int]]) -> list[tuple[int, ...]]:
    """Who stays, each set once."""
    found = {tuple(sorted(order[count:])): None for order in orders for count in range(1, ranks)}
    return list(found)


def _way(wish: Wish, work: Work, link: Link | None, capacity: Capacity) -> Way:
    """With all devices that it has."""
    division = choose(wish, work, link, capacity)
    case = _balanced(Case(work=work, degrees=division.degrees, capacity=capacity, link=link), division.placement)
    try:
        way = decide(wish.request.weights, case)
    except Refused:
        return Way(wish=wish, division=division, seconds=math.inf)
    turns = case.prompts if way.rows else 1
    seconds = turns * way.seconds if case.fits(way, usable=1.0) else math.inf
    return Way(wish=wish, division=replace(division, storage=way.storage, rows=way.rows), seconds=seconds)


def _balanced(case: Case, placement: Placement) -> Case:
    """With shares, where these cards are not alike, and a speed as they come to."""
    work, link, degrees = case.work, case.link, case.degrees
    if link is None or not are_known(work, placement, link) or degrees.pipeline_degree > 1:
        return case
    if are_unlike(work, placement, link) and degrees.context_parallel_size > 1:
        degrees = replace(degrees, shares=by_speed(work, link))
    return replace(case, degrees=degrees, link=together(work, degrees, link))
