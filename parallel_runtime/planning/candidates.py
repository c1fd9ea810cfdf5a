"""Makes every plan that a request allows: device subsets, degrees, stages, weight placement. What the user fixed is a
filter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import Refused
from ..request import RotateMethod
from ..specs import Parallelism, WeightPlacement, WeightsMode
from .default_plan import default_plan, default_plans, sequence_degrees
from .memory_model import FETCHED_MODES, SIMILAR_RATIO, MemoryModel, hardly_better
from .plan_inputs import PlanInputs
from .request_checks import check_request, check_stages
from .run_plan import RunPlan
from .seconds import alone_seconds_by_rank, are_heterogeneous, rotate_method_for, shares_by_speed


def candidates(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields the plans, the preferred one first where none is clearly faster. Raises Refused where the request cannot
    work."""
    for defaults in (_by_devices(inputs), _by_images(inputs)):
        for plan in defaults:
            for degrees in _other_degrees(inputs, plan):
                yield from _with_weights(inputs, plan, degrees)


def _by_devices(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields the default plans on all devices; then on fewer, if these are heterogeneous and nobody has named any."""
    plans, only = default_plans(inputs, inputs.devices), inputs.only
    on_all = plans[-1]
    devices = on_all.placement.devices
    if only is not None and only != on_all.placement:
        yield from _on_ranks(inputs, devices, [devices.index(device) for device in only.devices])
        return
    yield from (plan for plan in plans if only is None or plan.placement == only)
    may_leave_out = only is None and (inputs.automatic_devices or inputs.compared)
    if not may_leave_out or on_all.placement.shared or inputs.request.nnodes > 1:
        return
    orders = _orders_to_leave_out(inputs, on_all)
    for ranks in dict.fromkeys(tuple(sorted(order[count:])) for order in orders for count in range(1, len(devices))):
        with suppress(Refused):
            yield from (plan for plan in _on_ranks(inputs, devices, ranks) if plan.placement.world_size == len(ranks))


def _on_ranks(inputs: PlanInputs, devices: tuple[str, ...], ranks: Sequence[int]) -> Iterator[RunPlan]:
    """Yields the default plans on some of all `devices`. Raises Refused."""
    for plan in default_plans(inputs, tuple(devices[rank] for rank in ranks)):
        yield plan.among(devices, ranks[: len(plan.placement.devices)])


def _orders_to_leave_out(inputs: PlanInputs, on_all: RunPlan) -> Iterator[Sequence[int]]:
    """Yields the ranks in the order in which they may be left out: the slowest first, or the smallest budget first."""
    work, profile, budgets = inputs.work, inputs.profile_of(on_all), inputs.capacity.ranks
    if work is not None and profile is not None and are_heterogeneous(work, on_all.placement, profile):
        alone = alone_seconds_by_rank(work, profile)
        yield sorted(range(len(alone)), key=lambda rank: -alone[rank])
    if len(budgets) == on_all.placement.world_size and max(budgets) > SIMILAR_RATIO * min(budgets):
        yield sorted(range(len(budgets)), key=lambda rank: budgets[rank])


def _by_images(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields the default plans whose groups of workers have whole images of the batch, where the request leaves that
    open and workers compute alike."""
    request, work, count = inputs.request, inputs.work, len(inputs.devices)
    coupled = inputs.batch_coupled or inputs.images_coupled
    if request.data_degree or work is None or coupled or not inputs.is_free or request.nnodes > 1:
        return
    plan = default_plan(inputs)
    fixed = inputs.only is not None and inputs.only != plan.placement
    if fixed or plan.placement.shared or are_heterogeneous(work, plan.placement, inputs.profile_of(plan)):
        return
    for groups in range(2, min(count, work.sequences) + 1):
        if count % groups == 0:
            with suppress(Refused):
                yield default_plans(inputs, inputs.devices, groups)[-1]


def _other_degrees(inputs: PlanInputs, default: RunPlan) -> Iterator[Parallelism]:
    """Yields the degrees of a default plan; then for its workers other splits of the sequence, both prompts to all of
    them, and a pipeline."""
    request, first = inputs.request, default.degrees
    yield first
    undivided = inputs.undivided or (inputs.by_rows and first.context_parallel_size == 1)
    if inputs.is_free and not undivided and request.pipeline_degree <= 1:
        both = (1,) if first.cfg_degree == 2 and not request.cfg_degree else ()
        for cfg in (first.cfg_degree, *both):
            for ring, ulysses in sequence_degrees(inputs, first.world_size // (first.data_degree * cfg)):
                other = replace(first, cfg_degree=cfg, ring_degree=ring, ulysses_degree=ulysses)
                if other != first:
                    yield other
    stages = first.world_size // first.data_degree
    if request.pipeline_degree == 0 and stages > 1 and _may_be_pipeline(inputs, stages):
        yield replace(first, pipeline_degree=stages, ring_degree=1, ulysses_degree=1, cfg_degree=1)


def _may_be_pipeline(inputs: PlanInputs, stages: int) -> bool:
    request, work = inputs.request, inputs.work
    chosen = request.ring_degree or request.ulysses_degree or request.cfg_degree or request.weights != "auto"
    if chosen or work is None or not work.network.divisible:
        return False
    staged = replace(inputs, request=replace(request, pipeline_degree=stages))
    with suppress(Refused):
        check_request(staged)
        check_stages(staged.request, work.network)
        return True
    return False


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
    memory, degrees, profile = inputs.memory_of(plan), plan.degrees, inputs.profile_of(plan)
    work = memory.work
    if degrees.options.rotate_method == "auto":
        method: RotateMethod = "alltoall"
        if profile is not None and profile.bytes_per_second > 0:
            spacious = degrees.ring_degree > 1 and memory.may_all_gather()
            method = rotate_method_for(work, degrees, profile, spacious=spacious)
        degrees = degrees.with_options(rotate_method=method)
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
    least = [WeightPlacement(mode=mode) for mode in FETCHED_MODES if memory.allows(mode)] or [WeightPlacement()]
    return [(weights, False) for weights in least]


def _most_resident(mode: WeightsMode, memory: MemoryModel, before: WeightPlacement | None) -> WeightPlacement | None:
    """Returns the placement with as many resident blocks as fit, or the workers' present one if that is hardly worse;
    None where none fits."""
    if mode == "replicate":
        return WeightPlacement() if memory.fits(WeightPlacement()) else None
    best, workers = memory.most_resident(mode), memory.degrees.world_size
    if best is None or before is None or before.mode != mode or not memory.fits(before):
        return best
    return before if hardly_better(best, before, memory.blocks, workers) else best


def _requested(mode: WeightsMode, memory: MemoryModel, before: WeightPlacement | None) -> tuple[WeightPlacement, bool]:
    """Returns the placement of a mode that the user named, with the fewest bytes on each device, as they want the
    device for something else; and whether it fits with all prompts at once."""
    least = WeightPlacement(mode=mode if memory.allows(mode) else "replicate")
    weights = memory.shard(0) if least.mode == "shard" else least
    if before is not None and replace(before, shard_shares=()) == least and memory.fits(before):
        weights = before
    return weights, memory.fits(weights)
