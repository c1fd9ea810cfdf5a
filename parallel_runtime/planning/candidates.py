"""Makes every plan that a request allows: device subsets, degrees, stages, weight placement. What the user fixed is a
filter.

The default plan is the preferred one where neither sizes nor measurements are known. Degrees that the request leaves
open (0) are filled in: the two branches of guidance first, then Ulysses as far as the heads divide, then the ring."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from ..errors import Refused
from ..request import are_uneven, requested_shares
from ..specs import DEGREES, Parallelism, Placement, WeightPlacement, WeightsMode
from . import request_checks
from .memory_model import FETCHED_MODES, SIMILAR_RATIO, MemoryModel
from .network_stats import in_proportion
from .run_plan import PlanInputs, RunPlan
from .seconds import are_heterogeneous, rotate_method_for, single_worker_seconds_by_rank


def default_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the default plan on all devices of the request, or on the CPU. Raises Refused where it cannot work."""
    request, nnodes, devices = inputs.request, inputs.request.nnodes, inputs.devices
    request_checks.check_request(inputs)
    degrees = _default_degrees(inputs)
    if request_checks.is_too_much(degrees, inputs):
        raise request_checks.too_much(degrees, inputs, *_nearest(inputs))
    request_checks.check_workers(degrees, devices, inputs)
    local_workers = degrees.world_size // nnodes
    taken_devices = devices[:local_workers] or ("cpu",) * local_workers
    endpoint = request.rdzv_endpoint if nnodes > 1 else ""
    placement = Placement(devices=taken_devices, nnodes=nnodes, rdzv_endpoint=endpoint)
    request_checks.check_placement(request, placement)
    taken = _with_shares(inputs, degrees if inputs.may_split_prompts else _without_cfg_degree(inputs, degrees))
    if taken.shares_have_no_effect:
        if inputs.network.divisible or (request.cfg_degree and local_workers == (len(devices) or local_workers)):
            as_one, shares = _without_cfg_degree(inputs, degrees), request.shares.strip()
            words = request_checks.degrees_in_words(as_one)
            raise Refused("shares.unused", "shares", as_one.by_name, shares=shares, degrees=words)
        taken = replace(taken, shares=())  # of a config that a VAE has, too
    return RunPlan(degrees=taken, placement=placement)


def candidates(inputs: PlanInputs) -> Iterator[RunPlan]:
    """Yields every plan of devices, degrees and weight placement that the request allows, the preferred one first where
    none is clearly faster. Raises Refused where the request cannot work."""
    default, plans = default_plan(inputs), []
    everything = default.placement.devices
    for devices in _device_subsets(inputs, default):
        placement = replace(default.placement, devices=devices)
        for degrees in _degrees(inputs, default, placement):
            plan = replace(default, degrees=degrees, placement=placement)
            if set(devices) < set(everything):
                ranks = tuple(everything.index(device) for device in devices)
                left_out = tuple(device for rank, device in enumerate(everything) if rank not in ranks)
                plan = replace(plan, ranks=ranks, left_out=left_out)
            plans.append(plan)
    if not inputs.network.row_levels:  # a device that only repeats what others compute is better left out
        plans.sort(key=lambda plan: plan.degrees.data_degree)
    for plan in plans:
        yield from _with_weights(inputs, plan)


def _device_subsets(inputs: PlanInputs, default: RunPlan) -> Iterable[tuple[str, ...]]:
    """Returns the devices of the plans, the preferred ones first: all; then fewer, where nobody has named any; then
    more, for images of a network that is not divided. One that is split by rows has one for each prompt first."""
    request, devices = inputs.request, default.placement.devices
    if inputs.only is not None or default.placement.shared or request.nnodes > 1:
        return [devices if inputs.only is None else inputs.only.devices]
    subsets: list[tuple[str, ...]] = []
    may_split_rows = inputs.network.row_levels and inputs.sequence_degrees_open and request.pipeline_degree <= 1
    if may_split_rows and request.weights != "shard":  # a shard takes several workers for each prompt
        prompts = 1 if inputs.batch_coupled or request.cfg_degree == 1 else 2
        first = prompts * max(1, request.data_degree)
        subsets += [devices[:count] for count in (*range(first, len(devices) + 1), *range(1, first))]
    subsets.append(devices)
    if inputs.automatic_devices or inputs.compared:
        # Left out are the slowest first, or the smallest budget, or the last where no groups can have own images.
        orders: list[Sequence[int]] = []
        work, profile, ranks = inputs.work, inputs.profile_of(default), range(len(devices))
        budgets = inputs.capacity.ranks
        if work is not None and profile is not None and are_heterogeneous(work, default.placement, profile):
            seconds = single_worker_seconds_by_rank(work, profile)
            orders.append(sorted(ranks, key=lambda rank: -seconds[rank]))
        if len(budgets) == len(ranks) and max(budgets) > SIMILAR_RATIO * min(budgets):
            orders.append(sorted(ranks, key=lambda rank: budgets[rank]))
        if inputs.is_coupled:
            orders.append(ranks[::-1])
        for order in orders:
            for count in range(1, len(devices)):
                subsets.append(tuple(devices[rank] for rank in sorted(order[count:])))
    if not inputs.network.divisible:
        subsets += [inputs.devices[:count] for count in range(len(devices) + 1, len(inputs.devices) + 1)]
    return dict.fromkeys(subsets)


def _products(inputs: PlanInputs, workers: int) -> Iterator[Parallelism]:
    """Yields every product of degrees by which `workers` could divide this network's work, whatever the request says,
    the preferred one first: no stages before some, prompts before the sequence, Ulysses before a ring."""
    divisible, heads, no_ring = inputs.network.divisible, inputs.network.heads, inputs.network.no_lse
    for stages in _divisors(workers) if divisible else (1,):
        patches = inputs.request.options.token_patches if stages > 1 else 1
        options = replace(inputs.request.options, token_patches=patches)
        for data in _divisors(workers // stages):
            for cfg in (2, 1) if workers // (stages * data) % 2 == 0 else (1,):
                sharing = workers // (stages * data * cfg)
                for ring in _divisors(sharing) if divisible or sharing == 1 else ():
                    if sharing // ring <= heads and (ring == 1 or (not no_ring and stages == 1)):
                        yield Parallelism(
                            options=options, ring_degree=ring, ulysses_degree=sharing // ring, cfg_degree=cfg,
                            data_degree=data, pipeline_degree=stages,
                        )  # fmt: skip


@cache
def _divisors(workers: int) -> tuple[int, ...]:
    return tuple(degree for degree in range(1, workers + 1) if workers % degree == 0)


def _nearest(inputs: PlanInputs) -> tuple[Parallelism, dict[str, int]]:
    """Returns the degrees of the least changed request that works, and its changes: the fewest widgets, then the least
    apart, then the most workers. The request's own degrees need too many workers or heads."""
    request, options = inputs.request, []
    every = range(request.nnodes, request_checks.worker_limit(inputs) + 1, request.nnodes)
    asked = {name: getattr(request, name) for name in DEGREES}
    for degrees in (degrees for workers in every for degrees in _products(inputs, workers)):
        fix = {name: degree for name, degree in degrees.by_name.items() if asked[name] not in (0, degree)}
        apart = sum(abs(degree - asked[name]) for name, degree in fix.items())
        if degrees.pipeline_degree == 1 < request.options.token_patches:
            fix["patches"] = 1
        options.append((len(fix), apart, -degrees.world_size, fix))
    for *_, fix in sorted(options, key=lambda option: option[:3]):
        with suppress(Refused):
            changed = replace(inputs, request=request.with_values(fix))
            request_checks.check_request(changed)
            degrees = _default_degrees(changed)
            request_checks.check_workers(degrees, inputs.devices, changed)
            if not request_checks.is_too_much(degrees, changed):
                return degrees, fix
    raise AssertionError("one worker always works")


def _degrees(inputs: PlanInputs, default: RunPlan, placement: Placement) -> list[Parallelism]:
    """Returns every product of degrees that the request allows for these workers, the preferred one first; where rows
    may be split, none before some. With fewer images than data_degree groups compute the same."""
    request, network, workers = inputs.request, inputs.network, placement.world_size
    first = _default_degrees(inputs, workers)
    first = first if inputs.may_split_prompts else _without_cfg_degree(inputs, first)
    may_repeat = inputs.sequence_degrees_open and request.pipeline_degree <= 1
    # How many groups may have images of their own, or repeat what others compute.
    groups: Sequence[int] = [first.data_degree]
    if may_repeat and not (request.data_degree or inputs.is_coupled or placement.shared or placement.nnodes > 1):
        assert inputs.work is not None
        if not are_heterogeneous(inputs.work, default.placement, inputs.profile_of(default)):
            groups = _divisors(workers)
    found = [first] if first.world_size == workers else []
    found += [
        each for each in _products(inputs, workers) if each.data_degree in groups and _allows(inputs, each, first)
    ]
    usable = []
    for degrees in dict.fromkeys(found):
        with suppress(Refused):  # for shares that are for another number of workers
            taken = _with_shares(inputs, degrees)
            if not taken.shares_have_no_effect:
                usable.append(taken)
            elif not network.divisible:
                usable.append(replace(taken, shares=()))
    if network.row_levels:
        usable.sort(key=lambda degrees: degrees.context_parallel_size > 1)
    return usable


def _allows(inputs: PlanInputs, degrees: Parallelism, first: Parallelism) -> bool:
    """Does the request, whose own degrees are `first`, allow these?"""
    request = inputs.request
    if degrees.pipeline_degree == 1:
        may_share = inputs.sequence_degrees_open and request.pipeline_degree <= 1
        by_heads = inputs.network.heads % degrees.ulysses_degree == 0
        cfg_degrees = (first.cfg_degree,) if request.cfg_degree else (first.cfg_degree, 1)
        return may_share and by_heads and degrees.cfg_degree in cfg_degrees
    chosen = request.ring_degree or request.ulysses_degree or request.cfg_degree or request.weights != "auto"
    if request.pipeline_degree or chosen or degrees.cfg_degree * degrees.context_parallel_size > 1:
        return False
    with suppress(Refused):
        staged = replace(request, pipeline_degree=degrees.pipeline_degree)
        request_checks.check_request(replace(inputs, request=staged))
        return True
    return False


def _with_shares(inputs: PlanInputs, degrees: Parallelism) -> Parallelism:
    """Returns the degrees with the shares of the request. Raises Refused."""
    request = inputs.request
    named = len(inputs.devices) or degrees.world_size // request.nnodes
    return replace(degrees, shares=requested_shares(request.shares, degrees.world_size, named, request.nnodes))


def _default_degrees(inputs: PlanInputs, workers: int = 0) -> Parallelism:
    """Returns the degrees of the request, with those filled in that it leaves open, for this many workers or all."""
    request, divisible, heads = inputs.request, inputs.network.divisible, inputs.network.heads
    stages, data_degree = max(1, request.pipeline_degree), max(1, request.data_degree)
    workers = workers or request.nnodes * max(1, len(inputs.devices))
    workers = max(1, workers // (data_degree * stages))
    cfg = request.cfg_degree
    if not cfg and not divisible:
        cfg = 2 if workers >= 2 and not inputs.batch_coupled else 1
    elif not cfg:
        # Each branch of guidance would have a copy of the weights, which a shard keeps small; and prompts are not
        # divided, so uneven shares need the sequence.
        may_split = request.weights != "shard" and not are_uneven(request.shares)
        may_split = may_split and inputs.may_split_prompts and inputs.sequence_degrees_open
        cfg = 2 if may_split and workers % 2 == 0 else 1
    # What the request leaves open is as large as all workers can have, Ulysses first.
    ring, ulysses, workers = request.ring_degree, request.ulysses_degree, max(1, workers // cfg)
    if not divisible:
        ring, ulysses = 1, 1
    elif inputs.sequence_degrees_open and not inputs.has_no_ring:
        ulysses = max(degree for degree in _divisors(workers) if heads % degree == 0)
        ring = workers // ulysses
    elif ulysses:
        ring = ring or (1 if inputs.has_no_ring else max(1, workers // ulysses))
    else:
        ring = ring or 1
        ulysses = max(degree for degree in range(1, max(1, workers // ring) + 1) if heads % degree == 0)
    return Parallelism(
        options=request.options, ring_degree=ring, ulysses_degree=ulysses, cfg_degree=cfg, data_degree=data_degree,
        pipeline_degree=stages,
    )  # fmt: skip


def _without_cfg_degree(inputs: PlanInputs, degrees: Parallelism) -> Parallelism:
    """Returns the degrees with cfg_degree 1 for as many workers: those of the second branch of guidance share the
    heads, or the blocks of the sequence, or the images of the batch."""
    if degrees.cfg_degree == 1:
        return degrees
    heads, ulysses, no_ring = inputs.network.heads, 2 * degrees.ulysses_degree, inputs.has_no_ring
    if inputs.network.divisible and (heads % ulysses == 0 or (no_ring and ulysses <= heads)):
        return replace(degrees, cfg_degree=1, ulysses_degree=ulysses)
    if inputs.network.divisible and not no_ring:
        return replace(degrees, cfg_degree=1, ring_degree=2 * degrees.ring_degree)
    return replace(degrees, cfg_degree=1, data_degree=2 * degrees.data_degree)


def _with_weights(inputs: PlanInputs, plan: RunPlan) -> Iterator[RunPlan]:
    """Yields the plan with what memory and speed decide: stages, rotate_method, shares, and weight placements."""
    assert inputs.work is not None
    memory, profile, are_live = inputs.memory_of(plan), inputs.profile_of(plan), plan.placement == inputs.live
    work, degrees = memory.work, plan.degrees.with_options(rotate_method=rotate_method_for(memory, profile))
    if degrees.pipeline_degree > 1:
        degrees = replace(memory, degrees=degrees).with_stages()
    elif not degrees.shares and degrees.context_parallel_size * degrees.data_degree > 1:
        # By speed until the workers have learnt better ones.
        shares = inputs.shares.get(degrees) if are_live else None
        if shares is None and profile is not None and are_heterogeneous(work, plan.placement, profile):
            shares = in_proportion([1 / seconds for seconds in single_worker_seconds_by_rank(work, profile)])
        degrees = replace(degrees, shares=shares or ())
    plan = replace(plan, degrees=degrees)
    memory, before = inputs.memory_of(plan), inputs.before if are_live else None
    if inputs.keeps_placement and before is not None:
        yield replace(plan, weights=before)
        return
    entries = inputs.work.sequences if inputs.work.prompts_per_rank(plan.degrees) > 1 else 0
    choice = inputs.request.weights
    if choice == "auto":
        placements = _automatic(memory, before)
    else:  # with the fewest bytes on each device: the user wants it for something else
        least = WeightPlacement(mode=choice if memory.allows(choice) else "replicate")
        weights = memory.shard(0) if least.mode == "shard" else least
        if before is not None and replace(before, shard_shares=()) == least and memory.fits(before):
            weights = before
        placements = [(weights, memory.fits(weights))]
    for weights, in_one_batch in placements:
        yield replace(plan, weights=weights, entries_per_call=0 if in_one_batch else entries)


def _automatic(memory: MemoryModel, before: WeightPlacement | None) -> Sequence[tuple[WeightPlacement, bool]]:
    """Returns weight placements, each with whether all prompts are evaluated at once: replicated weights before others,
    and all prompts at once before one by one, which costs replicated weights nothing, and others a second fetch. Where
    nothing fits these are the placements that need least."""
    for modes in (("replicate",), FETCHED_MODES):
        for each in (memory, memory.with_one_prompt_per_batch):
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
