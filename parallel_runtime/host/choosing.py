"""Which division a run gets of those that its request allows: the first that works, the fastest once workers have
measured, and all workers on both prompts where their weights ask for it. The workers are always the same."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..errors import Refused
from ..specs import Division, RotateMethod
from .cost import Link, Work, activation_bytes, evaluation_seconds, rotating
from .pipelines import balanced, check_stages
from .planning import Seconds, Wish, plan
from .storing import USABLE, Capacity, Case, as_one_pays, fits_whole, has_place_nearby
from .unlike import are_unlike
from .unlike import seconds as by_shares


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
    """Both prompts to all workers where that pays: for their weights, or because one half would wait for the other."""
    as_one = _as_one(wish, seconds, branches)
    if as_one is None:
        return branches
    if wish.request.weights == "auto" and as_one_pays(case, replace(case, degrees=as_one.degrees)):
        return as_one
    work, link = case.work, case.link
    if wish.request.shares != "auto" or link is None or not are_unlike(work, branches.placement, link):
        return branches
    return min(branches, as_one, key=lambda way: by_shares(work, way.degrees, link))


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
