"""Makes every plan that a request allows: device subsets, degrees, stages, weight placement. What the user fixed is a
filter.

The default plan is the preferred one where neither sizes nor measurements are known. Degrees that the request leaves
open (0) are filled in: the two branches of guidance first, then Ulysses as far as the heads divide, then the ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import Refused
from ..specs import Parallelism, Placement, WeightPlacement, WeightsMode
from .memory_model import FETCHED_MODES, SIMILAR_RATIO, MemoryModel
from .plan_inputs import PlanInputs
from .request_checks import check_placement, check_request, check_workers, unused_shares
from .run_plan import RunPlan
from .seconds import alone_seconds_by_rank, are_heterogeneous, rotate_method_for, shares_by_speed
from .work_shares import are_uneven, are_unused, requested_shares


def default_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the default plan on all devices of the request. Raises Refused where the request cannot work."""
    return _plans_on(inputs, inputs.devices)[-1]


def candidates(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields the plans, the preferred one first where none is clearly faster. Raises Refused where the request cannot
    work."""
    for plan in _default_plans(inputs):
        for degrees in _other_degrees(inputs, plan):
            yield from _with_weights(inputs, plan, degrees)


def _default_plans(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields the default plans on all devices; then on fewer, if these are heterogeneous and nobody has named any; then
    those whose groups of workers have whole images of the batch, if the request leaves that open and workers compute
    alike."""
    request, work, only, plans = inputs.request, inputs.work, inputs.only, _plans_on(inputs, inputs.devices)
    assert work is not None
    on_all, devices = plans[-1], plans[-1].placement.devices
    if only is not None and only != on_all.placement:
        yield from _plans_of_ranks(inputs, devices, [devices.index(device) for device in only.devices])
        return
    yield from (plan for plan in plans if only is None or plan.placement == only)
    if on_all.placement.shared or request.nnodes > 1:
        return
    if only is None and (inputs.automatic_devices or inputs.compared):
        orders, counts = _orders_to_leave_out(inputs, on_all), range(1, len(devices))
        for ranks in dict.fromkeys(tuple(sorted(order[count:])) for order in orders for count in counts):
            with suppress(Refused):
                fewer = _plans_of_ranks(inputs, devices, ranks)
                yield from (plan for plan in fewer if plan.placement.world_size == len(ranks))
    heterogeneous = are_heterogeneous(work, on_all.placement, inputs.profile_of(on_all))
    coupled = inputs.batch_coupled or inputs.network.images_coupled
    if heterogeneous or coupled or request.data_degree or not inputs.is_free:
        return
    for groups in range(2, len(inputs.devices) + 1):
        if len(inputs.devices) % groups == 0:
            with suppress(Refused):
                yield _plans_on(inputs, inputs.devices, groups)[-1]


def _plans_of_ranks(inputs: PlanInputs, devices: tuple[str, ...], ranks: Sequence[int]) -> list[RunPlan]:
    """Returns the default plans on some of all `devices`. Raises Refused."""
    plans = _plans_on(inputs, tuple(devices[rank] for rank in ranks))
    return [plan.among(devices, ranks[: len(plan.placement.devices)]) for plan in plans]


def _orders_to_leave_out(inputs: PlanInputs, on_all: RunPlan) -> Iterator[Sequence[int]]:
    """Yields the ranks in the order in which they may be left out: the slowest first, or the smallest budget first."""
    work, profile, budgets = inputs.work, inputs.profile_of(on_all), inputs.capacity.ranks
    if work is not None and profile is not None and are_heterogeneous(work, on_all.placement, profile):
        alone = alone_seconds_by_rank(work, profile)
        yield sorted(range(len(alone)), key=lambda rank: -alone[rank])
    if len(budgets) == on_all.placement.world_size and max(budgets) > SIMILAR_RATIO * min(budgets):
        yield sorted(range(len(budgets)), key=lambda rank: budgets[rank])


def _plans_on(inputs: PlanInputs, devices: tuple[str, ...], data_degree: int = 1) -> list[RunPlan]:
    """Returns the default plan on these devices; `data_degree` fills in a 0 of the request. A network that may be split
    by rows has up to three: undivided, with a worker for each prompt; split, on as many devices as have rows of their
    own; and split, on all. Raises Refused."""
    request, network = inputs.request, inputs.network
    may_stay_undivided = network.row_levels and inputs.is_free and request.pipeline_degree <= 1
    if not may_stay_undivided or request.weights == "shard":  # a shard takes several workers for each prompt
        return [_plan_on(inputs, devices, data_degree)]
    plans = [_plan_on(replace(inputs, network=network.undivided(network.name)), devices, data_degree)]
    with suppress(Refused):
        plans.append(_plan_on(inputs, devices, data_degree))
        if plans[0].placement != plans[1].placement and (count := _workers_with_rows(inputs, plans[1])):
            plans.insert(1, _plan_on(inputs, plans[1].placement.devices[:count], data_degree))
    on_all = plans[-1].placement
    fewer = [plan.among(on_all.devices, range(plan.placement.world_size)) for plan in plans if plan.placement != on_all]
    return [*fewer, *(plan for plan in plans if plan.placement == on_all)]


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
    degrees = _default_degrees(inputs, nnodes * max(1, len(devices)), request.data_degree or data_degree)
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
        if inputs.network.divisible or (request.cfg_degree and local_workers == named):
            raise unused_shares(request.shares, of_one_branch)
        degrees = replace(degrees, shares=())  # of a config that a VAE has, too
    return RunPlan(degrees=degrees, placement=placement)


def _default_degrees(inputs: PlanInputs, world_size: int, data_degree: int) -> Parallelism:
    """Returns the degrees of the request, with those filled in that it leaves open."""
    request = inputs.request
    stages = max(1, request.pipeline_degree)
    workers = max(1, world_size // (data_degree * stages))
    cfg = request.cfg_degree or _auto_cfg_degree(inputs, workers)
    ring, ulysses = _sequence_degrees(inputs, max(1, workers // cfg))[0]
    return Parallelism(
        options=request.options,
        ring_degree=ring,
        ulysses_degree=ulysses,
        cfg_degree=cfg,
        data_degree=data_degree,
        pipeline_degree=stages,
    )


def _auto_cfg_degree(inputs: PlanInputs, workers: int) -> int:
    if not inputs.network.divisible:
        return 2 if workers >= 2 and not inputs.batch_coupled else 1
    # Each branch of guidance would have a copy of the weights, which a shard keeps small; and prompts are not divided,
    # so uneven shares need the sequence.
    may_split = inputs.request.weights != "shard" and not are_uneven(inputs.request.shares)
    return 2 if inputs.may_split_prompts and inputs.is_free and workers % 2 == 0 and may_split else 1


def _sequence_degrees(inputs: PlanInputs, workers: int) -> list[tuple[int, int]]:
    """Returns the ring and Ulysses degrees by which `workers` or fewer can share a sequence: those of the request, and
    where it leaves both open all that all workers can have, the largest Ulysses degree first."""
    ring, ulysses, heads = inputs.request.ring_degree, inputs.request.ulysses_degree, inputs.network.heads
    if not inputs.network.divisible:
        return [(1, 1)]
    if inputs.is_free and not inputs.has_no_ring:
        degrees = (degree for degree in range(workers, 0, -1) if workers % degree == 0 == heads % degree)
        return [(workers // degree, degree) for degree in degrees]
    ring = ring or int(inputs.has_no_ring)
    if ulysses:
        return [(ring or max(1, workers // ulysses), ulysses)]
    most = max(1, workers // ring)
    return [(ring, max(degree for degree in range(1, most + 1) if heads % degree == 0))]


def _without_cfg_degree(inputs: PlanInputs, degrees: Parallelism) -> Parallelism:
    """Returns the degrees with cfg_degree 1 for as many workers: those of the second branch of guidance share the
    sequence, or the images of the batch where neither heads nor a ring can take them."""
    ring, ulysses, no_ring = degrees.ring_degree, degrees.ulysses_degree, inputs.has_no_ring
    for_images = replace(degrees, cfg_degree=1, data_degree=2 * degrees.data_degree)
    if not inputs.network.divisible:
        return for_images
    if not no_ring and inputs.is_free:
        ring, ulysses = _sequence_degrees(inputs, 2 * ring * ulysses)[0]
    elif inputs.network.heads % (2 * ulysses) == 0 or (no_ring and 2 * ulysses <= inputs.network.heads):
        ulysses *= 2
    elif no_ring:
        return for_images
    else:
        ring *= 2
    return replace(degrees, cfg_degree=1, ring_degree=ring, ulysses_degree=ulysses)


def _other_degrees(inputs: PlanInputs, default: RunPlan) -> Iterator[Parallelism]:
    """Yields the degrees of a default plan; then for its workers other splits of the sequence, both prompts to all of
    them, and a pipeline."""
    request, first = inputs.request, default.degrees
    yield first
    workers = first.world_size // first.data_degree
    undivided = inputs.network.row_levels and first.context_parallel_size == 1
    if inputs.is_free and not undivided and request.pipeline_degree <= 1:
        for cfg in (first.cfg_degree,) if request.cfg_degree else dict.fromkeys((first.cfg_degree, 1)):
            for ring, ulysses in _sequence_degrees(inputs, workers // cfg):
                if cfg * ring * ulysses == workers and (cfg, ring, ulysses) != first.stage_mesh_shape[1:]:
                    yield replace(first, cfg_degree=cfg, ring_degree=ring, ulysses_degree=ulysses)
    chosen = request.ring_degree or request.ulysses_degree or request.cfg_degree or request.weights != "auto"
    if request.pipeline_degree == 0 and workers > 1 and not chosen:
        staged = replace(inputs, request=replace(request, pipeline_degree=workers))
        with suppress(Refused):
            yield _plan_on(staged, default.placement.devices, first.data_degree).degrees


def _with_weights(inputs: PlanInputs, default: RunPlan, degrees: Parallelism) -> Iterator[RunPlan]:
    """Yields plans of a default plan's workers by these degrees, with what follows from memory and speed: stages, the
    ring's rotate_method, shares, and weight placements."""
    assert inputs.work is not None
    plan = replace(default, degrees=degrees)
    plan = replace(plan, degrees=_measured_degrees(inputs, plan))
    memory = inputs.memory_of(plan)
    before = inputs.before if plan.placement == inputs.live else None
    if inputs.keeps_placement and before is not None:
        yield replace(plan, weights=before)
        return
    entries = inputs.work.sequences if inputs.work.prompts_per_rank(plan.degrees) > 1 else 0
    choice = inputs.request.weights
    placements = _automatic(memory, before) if choice == "auto" else [_requested(choice, memory, before)]
    for weights, in_one_batch in placements:
        yield replace(plan, weights=weights, entries_per_call=0 if in_one_batch else entries)


def _measured_degrees(inputs: PlanInputs, plan: RunPlan) -> Parallelism:
    """Returns the degrees with stages, rotate_method and shares. Shares go by speed until the workers have learnt
    better ones."""
    memory, profile = inputs.memory_of(plan), inputs.profile_of(plan)
    work, degrees = memory.work, plan.degrees.with_options(rotate_method=rotate_method_for(memory, profile))
    if degrees.pipeline_degree > 1:
        return replace(memory, degrees=degrees).with_stages()
    if degrees.shares or degrees.context_parallel_size * degrees.data_degree == 1:
        return degrees
    shares = inputs.shares.get(degrees) if plan.placement == inputs.live else None
    if shares is None and profile is not None and are_heterogeneous(work, plan.placement, profile):
        shares = shares_by_speed(work, profile)
    return replace(degrees, shares=shares) if shares else degrees


def _automatic(memory: MemoryModel, before: WeightPlacement | None) -> Sequence[tuple[WeightPlacement, bool]]:
    """Returns weight placements, each with whether all prompts are evaluated at once: replicated weights before others,
    and all prompts at once before one by one, which costs replicated weights nothing, and others a second fetch. Where
    nothing fits these are the placements that need least."""
    for modes in (("replicate",), FETCHED_MODES):
        for each in (memory, memory.one_by_one):
            if placements := [weights for mode in modes if (weights := _most_resident(mode, each, before)) is not None]:
                return [(weights, each is memory) for weights in placements]
    return [(weights, False) for weights in memory.least_placements]


def _most_resident(mode: WeightsMode, memory: MemoryModel, before: WeightPlacement | None) -> WeightPlacement | None:
    """Returns the placement with as many resident blocks as fit, or the workers' present one if that has at most a
    tenth of the blocks less, which is not worth loading the model anew; None where none fits."""
    best = memory.most_resident(mode)
    if best is None or before is None or before.mode != mode or not memory.fits(before):
        return best
    ranks = range(memory.degrees.world_size)
    gained = [best.resident_blocks_on(rank) - before.resident_blocks_on(rank) for rank in ranks]
    return before if min(gained) >= 0 and max(gained) <= math.ceil(memory.blocks / 10) else best


def _requested(mode: WeightsMode, memory: MemoryModel, before: WeightPlacement | None) -> tuple[WeightPlacement, bool]:
    """Returns the placement of a mode that the user named, with the fewest bytes on each device, as they want the
    device for something else; and whether it fits with all prompts at once."""
    least = WeightPlacement(mode=mode if memory.allows(mode) else "replicate")
    weights = memory.shard(0) if least.mode == "shard" else least
    if before is not None and replace(before, shard_shares=()) == least and memory.fits(before):
        weights = before
    return weights, memory.fits(weights)
