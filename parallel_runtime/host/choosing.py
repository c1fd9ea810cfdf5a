"""Which division a run gets of those that its request allows: the first that works, the fastest once workers have
measured, and all workers on both prompts where their weights ask for it. The workers are always the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..errors import Refused
from ..specs import Division, ParallelRequest, Placement, RotateMethod
from .cost import Figures, Link, Work, evaluation_seconds, rotating
from .planning import check_step_cache, plan
from .storing import Case, as_one_pays

Divide = Callable[[ParallelRequest], Division]


def choose(
    request: ParallelRequest,
    figures: Figures,
    *,
    gpus: int,
    kind: str,
    guided: bool = False,
    together: bool = False,
    ringless: bool = False,
    work: Work | None = None,
    measured: Callable[[Placement], Link | None] = lambda placement: None,
    case: Callable[[Division], Case],
) -> Division:
    """For a network of these `figures`: by estimated speed once `work` and what the workers have `measured` are known,
    and by memory, which `case` tells. Raises Refused where the request cannot work.
    """
    check_step_cache(request, figures)
    divide = partial(
        plan,
        heads=figures.heads,
        gpus=gpus,
        kind=kind,
        guided=guided,
        together=together,
        ringless=ringless,
        whole="" if figures.divisible else figures.name,
    )
    division = divide(request)
    link = measured(division.placement)
    if work is None or link is None or not link.bytes_per_second:
        return _rotated(division, "alltoall")
    room = case(division).capacity.device_bytes
    divide = partial(divide, seconds=partial(evaluation_seconds, work, link=link, device_bytes=room))
    division = divide(request)
    if division.degrees.cfg_degree == 2 and not request.cfg_degree and request.weights == "auto":
        as_one, branches = _as_one(divide, request, division), case(division)
        if as_one is not None and as_one_pays(branches, replace(branches, degrees=as_one.degrees)):
            division = as_one
    return _rotated(division, rotating(work, division.degrees, link, room))


def _rotated(division: Division, method: RotateMethod) -> Division:
    """With what `auto` comes to."""
    if division.degrees.rotate_method != "auto":
        return division
    return replace(division, degrees=replace(division.degrees, rotate_method=method))


def _as_one(divide: Divide, request: ParallelRequest, branches: Division) -> Division | None:
    """Both prompts to each of the workers; None where one sequence has no use for all of them."""
    devices = ",".join(branches.placement.devices)
    with suppress(Refused):
        as_one = divide(replace(request, cfg_degree=1, devices=devices))
        return as_one if as_one.placement == branches.placement else None
    return None
