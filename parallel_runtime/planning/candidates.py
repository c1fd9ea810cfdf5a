"""Makes every plan that a request allows: device subsets, degrees, stages, weight placement. What the user fixed is a
filter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import Refused
from ..request import RotateMethod
from ..specs import Parallelism, Placement, WeightPlacement, WeightsMode
from .device_names import parse_devices
from .device_profile import DeviceProfile
from .memory_model import FETCHED_MODES, SIMILAR_RATIO, MemoryModel, hardly_better
from .plan_inputs import PlanInputs
from .request_checks import check_placement, check_request, check_stages, check_workers, unused_shares
from .run_plan import RunPlan
from .seconds import alone_seconds_by_rank, are_heterogeneous, rotate_method_for, shares_by_speed
from .work_shares import are_uneven, are_unused, requested_shares


def unsized_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the devices and degrees that are preferred where neither sizes nor measurements are known. Raises Refused
    where the request cannot work."""
    devices = parse_devices(inputs.request.devices, inputs.gpus, inputs.kind)
    *_, widest = _usual_plans(_in_groups(inputs, 1), devices)
    return widest


def candidates(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields the plans, the preferred one first where none is clearly faster. Raises Refused where the request cannot
    work."""
    together = _in_groups(inputs, 1)
    for usual in _device_subsets(together):
        for degrees in _degrees(together, usual):
            yield from _with_weights(together, usual, degrees)
    for groups in _image_groups(inputs):
        apart = _in_groups(inputs, groups)
        with suppress(Refused):
            usual = unsized_plan(apart)
            for degrees in _degrees(apart, usual):
                yield from _with_weights(apart, usual, degrees)


def _in_groups(inputs: PlanInputs, groups: int) -> PlanInputs:
    """Returns the inputs with this many groups for the images of a batch, where the request leaves that open."""
    request = inputs.request
    return inputs if request.data_degree else replace(inputs, request=replace(request, data_degree=groups))


def _image_groups(inputs: PlanInputs) -> list[int]:
    """Returns the numbers of groups that may have whole images, where the request leaves that open and workers compute
    alike."""
    request, work = inputs.request, inputs.work
    devices = parse_devices(request.devices, inputs.gpus, inputs.kind)
    coupled = inputs.batch_coupled or inputs.images_coupled
    if request.data_degree or work is None or coupled or not inputs.is_free or request.nnodes > 1:
        return []
    usual = unsized_plan(inputs)
    placed = inputs.only is not None and inputs.only != usual.placement
    if placed or usual.placement.shared or are_heterogeneous(work, usual.placement, profile_of(inputs, usual)):
        return []
    return [groups for groups in range(2, min(len(devices), work.sequences) + 1) if len(devices) % groups == 0]


def profile_of(inputs: PlanInputs, plan: RunPlan) -> DeviceProfile | None:
    """Returns what the workers of `plan` measured together, else among those of all devices."""
    known = inputs.profiles.get(plan.placement)
    return known if known is not None or inputs.profile is None else inputs.profile.of(plan.ranks)


def memory_of(inputs: PlanInputs, plan: RunPlan, degrees: Parallelism | None = None) -> MemoryModel:
    """Returns the MemoryModel of an evaluation by `plan`, or by other `degrees` of the same workers."""
    assert inputs.work is not None, "memory goes by sizes"
    capacity = inputs.capacity.of(plan.ranks)
    work = replace(inputs.work, prompts=1) if plan.entries_per_call else inputs.work
    automatic = inputs.request.weights == "auto"
    return MemoryModel(work=work, degrees=degrees or plan.degrees, capacity=capacity, automatic=automatic)


def _device_subsets(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields the usual plans on all devices; then on fewer, where these are heterogeneous and nobody has named any."""
    all_devices = parse_devices(inputs.request.devices, inputs.gpus, inputs.kind)
    usual, only = _usual_plans(inputs, all_devices), inputs.only
    widest = usual[-1]
    devices = widest.placement.devices
    if only is not None and only != widest.placement:
        yield from _on_ranks(inputs, devices, [devices.index(device) for device in only.devices])
        return
    yield from (plan for plan in usual if only is None or plan.placement == only)
    chosen = only is not None or not (inputs.automatic_devices or inputs.compared)
    if chosen or widest.placement.shared or inputs.request.nnodes > 1:
        return
    orders = _orders(inputs, widest)
    for some in dict.fromkeys(tuple(sorted(order[count:])) for order in orders for count in range(1, len(devices))):
        with suppress(Refused):
            yield from (plan for plan in _on_ranks(inputs, devices, some) if plan.placement.world_size == len(some))


def _usual_plans(inputs: PlanInputs, devices: tuple[str, ...]) -> list[RunPlan]:
    """Returns the preferred plan on these devices. For a network that may be split by rows these are up to three: it is
    undivided, on one device for each prompt; split, on as many devices as have rows of their own; and split, on all.
    Raises Refused."""
    in_parts = inputs.request.weights == "shard"  # which takes several workers for each prompt
    if not (inputs.by_rows and inputs.is_free) or inputs.request.pipeline_degree > 1 or in_parts:
        return [_preferred(inputs, devices)]
    undivided = _preferred(replace(inputs, undivided=inputs.by_rows), devices)
    try:
        by_rows = _preferred(inputs, devices)
    except Refused:
        return [undivided]
    if undivided.placement == by_rows.placement:
        return [undivided, by_rows] if undivided.degrees != by_rows.degrees else [undivided]
    fewer = [plan for plan in (undivided, *_on_as_many_as_rows(inputs, by_rows)) if plan.placement != by_rows.placement]
    on_first = [_among(by_rows.placement.devices, range(plan.placement.world_size), plan) for plan in fewer]
    return [*on_first, by_rows]


def _on_as_many_as_rows(inputs: PlanInputs, by_rows: RunPlan) -> list[RunPlan]:
    """Returns the preferred plan on as many of these devices as have rows of their own; [] if all have."""
    degrees, rows = by_rows.degrees, inputs.work.row_ranks if inputs.work else 0
    if not 0 < rows < degrees.context_parallel_size or by_rows.placement.nnodes > 1:
        return []
    devices = by_rows.placement.devices
    count = min(rows * degrees.data_degree * (2 if inputs.may_split_prompts else 1), len(devices) - 1)
    with suppress(Refused):
        return [_preferred(inputs, devices[:count])]
    return []


def _on_ranks(inputs: PlanInputs, devices: tuple[str, ...], ranks: Sequence[int]) -> Iterator[RunPlan]:
    """Yields the usual plans on some of all `devices`. Raises Refused."""
    for plan in _usual_plans(inputs, tuple(devices[rank] for rank in ranks)):
        yield _among(devices, ranks[: len(plan.placement.devices)], plan)


def _among(devices: tuple[str, ...], ranks: Sequence[int], plan: RunPlan) -> RunPlan:
    """Returns `plan`, which has the ranks `ranks` of all `devices`, with the devices that it leaves out."""
    left_out = tuple(device for rank, device in enumerate(devices) if rank not in ranks)
    return replace(plan, ranks=tuple(ranks), left_out=left_out)


def _orders(inputs: PlanInputs, widest: RunPlan) -> Iterator[Sequence[int]]:
    """Yields the ranks in the order in which they may be left out: the slowest first, or the smallest budget first."""
    work, profile, budgets = inputs.work, profile_of(inputs, widest), inputs.capacity.ranks
    if work is not None and profile is not None and are_heterogeneous(work, widest.placement, profile):
        alone = alone_seconds_by_rank(work, profile)
        yield sorted(range(len(alone)), key=lambda rank: -alone[rank])
    if len(budgets) == widest.placement.world_size and max(budgets) > SIMILAR_RATIO * min(budgets):
        yield sorted(range(len(budgets)), key=lambda rank: budgets[rank])


def _preferred(inputs: PlanInputs, devices: tuple[str, ...]) -> RunPlan:
    """Returns the plan that uses the two branches of guidance first, then Ulysses as far as heads divide, then the
    ring. Raises Refused."""
    request, nnodes = inputs.request, inputs.request.nnodes
    check_request(inputs)
    world_size = nnodes * max(1, len(devices))
    degrees = _branches(inputs, world_size) if inputs.undivided else _sequence(inputs, world_size)
    check_workers(degrees, devices, inputs)
    local_workers = degrees.world_size // nnodes
    placement = Placement(
        devices=devices[:local_workers] or ("cpu",) * local_workers,
        nnodes=nnodes,
        rdzv_endpoint=request.rdzv_endpoint if nnodes > 1 else "",
    )
    check_placement(request, placement)
    as_one = _as_one(inputs, degrees) if degrees.cfg_degree == 2 else degrees
    if not inputs.may_split_prompts:
        degrees = as_one
    every = len(devices) or local_workers
    degrees = replace(degrees, shares=requested_shares(request.shares, degrees.world_size, every, nnodes))
    if are_unused(degrees):
        if not inputs.undivided or (request.cfg_degree and local_workers == every):
            raise unused_shares(request.shares, as_one)
        degrees = replace(degrees, shares=())  # of a config that a VAE has, too
    return RunPlan(degrees=degrees, placement=placement)


def _branches(inputs: PlanInputs, world_size: int) -> Parallelism:
    """Returns the degrees of a network that is not split: both prompts side by side where there are devices for it, on
    as many groups as data_degree says."""
    request = inputs.request
    several = not inputs.batch_coupled and world_size // request.data_degree >= 2
    cfg = request.cfg_degree or (2 if several else 1)
    return Parallelism(options=request.options, cfg_degree=cfg, data_degree=request.data_degree)


def _sequence(inputs: PlanInputs, world_size: int) -> Parallelism:
    """Returns the degrees of a network that is split, with those filled in that are 0 in the request."""
    request = inputs.request
    stages, cfg = max(1, request.pipeline_degree), request.cfg_degree
    workers = max(1, world_size // (request.data_degree * stages))
    if cfg == 0:
        # Each branch of guidance would have a copy of the weights, which a shard keeps small; and prompts are not
        # divided, so uneven shares need the sequence.
        may_split = request.weights != "shard" and not are_uneven(request.shares)
        cfg = 2 if inputs.may_split_prompts and inputs.is_free and workers % 2 == 0 and may_split else 1
    workers = max(1, workers // cfg)
    ring, ulysses = request.ring_degree or int(_has_no_ring(inputs)), request.ulysses_degree
    if not ring and not ulysses:
        ring, ulysses = _sequence_degrees(inputs, workers)[0]
    elif not ring:
        ring = max(1, workers // ulysses)
    elif not ulysses:
        most = max(1, workers // ring)
        ulysses = max(degree for degree in range(1, most + 1) if inputs.heads % degree == 0)
    return Parallelism(
        options=request.options,
        ring_degree=ring,
        ulysses_degree=ulysses,
        cfg_degree=cfg,
        data_degree=request.data_degree,
        pipeline_degree=stages,
    )


def _has_no_ring(inputs: PlanInputs) -> bool:
    return inputs.no_lse or inputs.request.pipeline_degree > 1


def _sequence_degrees(inputs: PlanInputs, workers: int) -> list[tuple[int, int]]:
    """Returns ring and Ulysses degrees for this many workers on one sequence, the largest Ulysses degree first."""
    heads, least = inputs.heads, workers if _has_no_ring(inputs) else 1
    divisors = (degree for degree in range(workers, least - 1, -1) if workers % degree == 0 == heads % degree)
    return [(workers // degree, degree) for degree in divisors]


def _as_one(inputs: PlanInputs, degrees: Parallelism) -> Parallelism:
    """Returns the degrees without a second branch of guidance: the workers that cfg_degree would have given it join the
    sequence, or the entries of the batch where neither heads nor a ring can take them."""
    ring, ulysses, no_ring = degrees.ring_degree, degrees.ulysses_degree, _has_no_ring(inputs)
    as_data = replace(degrees, cfg_degree=1, data_degree=2 * degrees.data_degree)
    if inputs.undivided:
        return as_data
    if not no_ring and inputs.is_free:
        ring, ulysses = _sequence_degrees(inputs, 2 * ring * ulysses)[0]
    elif inputs.heads % (2 * ulysses) == 0 or (no_ring and 2 * ulysses <= inputs.heads):
        ulysses *= 2
    elif no_ring:
        return as_data
    else:
        ring *= 2
    return replace(degrees, cfg_degree=1, ring_degree=ring, ulysses_degree=ulysses)


def _degrees(inputs: PlanInputs, usual: RunPlan) -> Iterator[Parallelism]:
    """Yields degrees for the usual plan's workers: its own, other splits of the sequence, both prompts to all of them,
    a pipeline."""
    request, first = inputs.request, usual.degrees
    yield first
    undivided = inputs.undivided or (inputs.by_rows and first.context_parallel_size == 1)
    if inputs.is_free and not undivided and request.pipeline_degree <= 1:
        both = (1,) if first.cfg_degree == 2 and not request.cfg_degree else ()
        for cfg in (first.cfg_degree, *both):
            for ring, ulysses in _sequence_degrees(inputs, first.world_size // (first.data_degree * cfg)):
                other = replace(first, cfg_degree=cfg, ring_degree=ring, ulysses_degree=ulysses)
                if other != first:
                    yield other
    stages = first.world_size // first.data_degree
    if request.pipeline_degree == 0 and stages > 1 and _may_be_stages(inputs, stages):
        yield replace(first, pipeline_degree=stages, ring_degree=1, ulysses_degree=1, cfg_degree=1)


def _may_be_stages(inputs: PlanInputs, stages: int) -> bool:
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


def _with_weights(inputs: PlanInputs, usual: RunPlan, degrees: Parallelism) -> Iterator[RunPlan]:
    """Yields plans of the usual workers by these degrees, with what follows from memory and speed: stages, the ring's
    rotate_method, shares, and places for the weights."""
    assert inputs.work is not None
    degrees = _measured_degrees(inputs, usual, memory_of(inputs, usual, degrees))
    memory = memory_of(inputs, usual, degrees)
    before = inputs.before if usual.placement == inputs.live else None
    if inputs.keeps_placement and before is not None:
        yield replace(usual, degrees=degrees, weights=before)
        return
    entries = inputs.work.sequences if inputs.work.prompts_per_rank(degrees) > 1 else 0
    choice = inputs.request.weights
    placements = _automatic(memory, before) if choice == "auto" else [_fixed(choice, memory, before)]
    for weights, in_one_batch in placements:
        yield replace(usual, degrees=degrees, weights=weights, entries_per_call=0 if in_one_batch else entries)


def _measured_degrees(inputs: PlanInputs, usual: RunPlan, memory: MemoryModel) -> Parallelism:
    """Returns the degrees with stages, rotate_method and shares. Shares go by speed until the workers have learnt
    better ones."""
    degrees, work, profile = memory.degrees, memory.work, profile_of(inputs, usual)
    if degrees.options.rotate_method == "auto":
        method: RotateMethod = "alltoall"
        if profile is not None and profile.bytes_per_second > 0:
            spacious = degrees.ring_degree > 1 and memory.may_collect()
            method = rotate_method_for(work, degrees, profile, spacious=spacious)
        degrees = degrees.with_options(rotate_method=method)
    if degrees.pipeline_degree > 1:
        return replace(memory, degrees=degrees).with_stages()
    if degrees.shares or degrees.context_parallel_size * degrees.data_degree == 1:
        return degrees
    shares = inputs.shares.get(degrees) if usual.placement == inputs.live else None
    if shares is None and profile is not None and are_heterogeneous(work, usual.placement, profile):
        shares = shares_by_speed(work, profile)
    return replace(degrees, shares=shares) if shares else degrees


def _automatic(memory: MemoryModel, before: WeightPlacement | None) -> Sequence[tuple[WeightPlacement, bool]]:
    """Returns places for the weights, each with whether all prompts are evaluated at once: replicated weights before
    others, and all prompts at once before one by one, which costs replicated weights nothing, and others a second
    fetch. Where nothing fits these are the places that need least."""
    for modes in (("replicate",), FETCHED_MODES):
        for each in (memory, memory.one_by_one):
            if placements := [weights for mode in modes if (weights := _fullest(mode, each, before)) is not None]:
                return [(weights, each is memory) for weights in placements]
    least = [WeightPlacement(mode=mode) for mode in FETCHED_MODES if memory.allows(mode)] or [WeightPlacement()]
    return [(weights, False) for weights in least]


def _fullest(mode: WeightsMode, memory: MemoryModel, before: WeightPlacement | None) -> WeightPlacement | None:
    """Returns the placement with as many resident blocks as fit, or the workers' present one if that is hardly worse;
    None where none fits."""
    if mode == "replicate":
        return WeightPlacement() if memory.fits(WeightPlacement()) else None
    best, workers = memory.fullest(mode), memory.degrees.world_size
    if best is None or before is None or before.mode != mode or not memory.fits(before):
        return best
    return before if hardly_better(best, before, memory.blocks, workers) else best


def _fixed(mode: WeightsMode, memory: MemoryModel, before: WeightPlacement | None) -> tuple[WeightPlacement, bool]:
    """Returns the placement with the fewest bytes on each device, and whether it fits with all prompts at once: a user
    who names a mode wants the device for something else."""
    least = WeightPlacement(mode=mode if memory.allows(mode) else "replicate")
    weights = memory.shard(0) if least.mode == "shard" else least
    if before is not None and replace(before, shard_shares=()) == least and memory.fits(before):
        weights = before
    return weights, memory.fits(weights)
