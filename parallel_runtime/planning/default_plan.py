"""The default plan: devices and degrees of a request where neither sizes nor measurements are known.

Degrees that the request leaves open (0) are filled in: the two branches of guidance first, then Ulysses as far as the
heads divide, then the ring. candidates.py varies the default plan once sizes are known.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ..errors import Refused
from ..specs import Parallelism, Placement
from .plan_inputs import PlanInputs
from .request_checks import check_placement, check_request, check_workers, unused_shares
from .run_plan import RunPlan
from .work_shares import are_uneven, are_unused, requested_shares


def default_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the default plan on all devices of the request. Raises Refused where the request cannot work."""
    return default_plans(inputs, inputs.devices)[-1]


def default_plans(inputs: PlanInputs, devices: tuple[str, ...], data_degree: int = 1) -> list[RunPlan]:
    """Returns the default plan on these devices; `data_degree` fills in a 0 of the request. A network that may be split
    by rows has up to three: undivided, with a worker for each prompt; split, on as many devices as have rows of their
    own; and split, on all. Raises Refused."""
    request = inputs.request
    may_stay_undivided = inputs.by_rows and inputs.is_free and request.pipeline_degree <= 1
    if not may_stay_undivided or request.weights == "shard":  # a shard takes several workers for each prompt
        return [_plan_on(inputs, devices, data_degree)]
    undivided = _plan_on(replace(inputs, undivided=inputs.by_rows), devices, data_degree)
    try:
        split = _plan_on(inputs, devices, data_degree)
    except Refused:
        return [undivided]
    if undivided.placement == split.placement:
        return [undivided, split] if undivided.degrees != split.degrees else [undivided]
    fewer = [undivided]
    if count := _workers_with_rows(inputs, split):
        with suppress(Refused):
            fewer.append(_plan_on(inputs, split.placement.devices[:count], data_degree))
    fewer = [plan for plan in fewer if plan.placement != split.placement]
    return [*(plan.among(split.placement.devices, range(plan.placement.world_size)) for plan in fewer), split]


def _workers_with_rows(inputs: PlanInputs, split: RunPlan) -> int:
    """Returns how many of the workers of `split` have rows of their own; 0 if all have."""
    degrees, rows = split.degrees, inputs.work.row_ranks if inputs.work else 0
    if not 0 < rows < degrees.context_parallel_size or split.placement.nnodes > 1:
        return 0
    prompts = 2 if inputs.may_split_prompts else 1
    return min(rows * degrees.data_degree * prompts, split.placement.world_size - 1)


def _plan_on(inputs: PlanInputs, devices: tuple[str, ...], data_degree: int) -> RunPlan:
    """Returns the plan on these devices; "cpu" once a worker where there are none. Raises Refused."""
    request, nnodes = inputs.request, inputs.request.nnodes
    check_request(inputs)
    degrees = _fill_in(inputs, nnodes * max(1, len(devices)), request.data_degree or data_degree)
    check_workers(degrees, devices, inputs)
    local_workers = degrees.world_size // nnodes
    placement = Placement(
        devices=devices[:local_workers] or ("cpu",) * local_workers,
        nnodes=nnodes,
        rdzv_endpoint=request.rdzv_endpoint if nnodes > 1 else "",
    )
    check_placement(request, placement)
    of_one_branch = _without_cfg_degree(inputs, degrees) if degrees.cfg_degree == 2 else degrees
    if not inputs.may_split_prompts:
        degrees = of_one_branch
    named = len(devices) or local_workers
    degrees = replace(degrees, shares=requested_shares(request.shares, degrees.world_size, named, nnodes))
    if are_unused(degrees):
        if not inputs.undivided or (request.cfg_degree and local_workers == named):
            raise unused_shares(request.shares, of_one_branch)
        degrees = replace(degrees, shares=())  # of a config that a VAE has, too
    return RunPlan(degrees=degrees, placement=placement)


def _fill_in(inputs: PlanInputs, world_size: int, data_degree: int) -> Parallelism:
    """Returns the degrees of the request, with those filled in that it leaves open."""
    request = inputs.request
    stages = max(1, request.pipeline_degree)
    workers = max(1, world_size // (data_degree * stages))
    cfg = request.cfg_degree or _auto_cfg_degree(inputs, workers)
    ring = ulysses = 1
    if not inputs.undivided:
        ring, ulysses = _auto_sequence_degrees(inputs, max(1, workers // cfg))
    return Parallelism(
        options=request.options,
        ring_degree=ring,
        ulysses_degree=ulysses,
        cfg_degree=cfg,
        data_degree=data_degree,
        pipeline_degree=stages,
    )


def _auto_cfg_degree(inputs: PlanInputs, workers: int) -> int:
    if inputs.undivided:
        return 2 if workers >= 2 and not inputs.batch_coupled else 1
    # Each branch of guidance would have a copy of the weights, which a shard keeps small; and prompts are not divided,
    # so uneven shares need the sequence.
    may_split = inputs.request.weights != "shard" and not are_uneven(inputs.request.shares)
    return 2 if inputs.may_split_prompts and inputs.is_free and workers % 2 == 0 and may_split else 1


def _auto_sequence_degrees(inputs: PlanInputs, workers: int) -> tuple[int, int]:
    """Returns ring and Ulysses degrees: those of the request, and for one that is 0 what `workers` leave for it."""
    ring, ulysses = inputs.request.ring_degree or int(inputs.has_no_ring), inputs.request.ulysses_degree
    if not ring and not ulysses:
        return sequence_degrees(inputs, workers)[0]
    if not ulysses:
        most = max(1, workers // ring)
        return ring, max(degree for degree in range(1, most + 1) if inputs.heads % degree == 0)
    return ring or max(1, workers // ulysses), ulysses


def sequence_degrees(inputs: PlanInputs, workers: int) -> list[tuple[int, int]]:
    """Returns the ring and Ulysses degrees by which this many workers can share a sequence, the largest Ulysses degree
    first."""
    heads, least = inputs.heads, workers if inputs.has_no_ring else 1
    divisors = (degree for degree in range(workers, least - 1, -1) if workers % degree == 0 == heads % degree)
    return [(workers // degree, degree) for degree in divisors]


def _without_cfg_degree(inputs: PlanInputs, degrees: Parallelism) -> Parallelism:
    """Returns the degrees with cfg_degree 1 for as many workers: those of the second branch of guidance share the
    sequence, or the images of the batch where neither heads nor a ring can take them."""
    ring, ulysses, no_ring = degrees.ring_degree, degrees.ulysses_degree, inputs.has_no_ring
    for_images = replace(degrees, cfg_degree=1, data_degree=2 * degrees.data_degree)
    if inputs.undivided:
        return for_images
    if not no_ring and inputs.is_free:
        ring, ulysses = sequence_degrees(inputs, 2 * ring * ulysses)[0]
    elif inputs.heads % (2 * ulysses) == 0 or (no_ring and 2 * ulysses <= inputs.heads):
        ulysses *= 2
    elif no_ring:
        return for_images
    else:
        ring *= 2
    return replace(degrees, cfg_degree=1, ring_degree=ring, ulysses_degree=ulysses)
