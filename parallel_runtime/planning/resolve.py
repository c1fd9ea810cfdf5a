"""The plan of a run: the best of all candidates, or what is nearest to one that fits. And the workers that have a text
encoder: arithmetic on bytes.

An encoder is whole on the one with the most room, else in stages, else on one that fetches blocks from main memory:
beside the models that are loaded if any of these fits there, else in their place. Example: of 12 GiB in 6 equal blocks
two workers have three each, with 8 GiB beside the network; with 5 GiB, one fetches all, in turn, into two buffers of
2 GiB.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..architectures.network_modules import Load, share_out
from ..errors import Refused, say
from ..specs import BLOCK_BUFFERS, WeightPlacement
from .candidates import candidates
from .memory_model import SIMILAR_RATIO, misfit, size_in_words
from .run_plan import REPLICATED, Estimate, PlanInputs, RunPlan
from .seconds import ALL_TO_ALL_BYTES_PER_SECOND, are_measured, averaged, evaluation_seconds

# Other workers are taken for a plan that is at least 5 % faster: less is noise, and they have to start.
MIN_GAIN_TO_SWITCH = 0.95
# Of the seconds of a ring on fast links: Ulysses, which comes first, has fewer kernels and launches.
MAX_LOSS_TO_ULYSSES = 0.97
SLOW_LINK_BYTES_PER_SECOND = 4e9  # between 10 GbE (1.2e9) and PCIe 4 x16 (3e10)


def resolve(inputs: PlanInputs) -> RunPlan:
    """Returns the best plan. Raises Refused, with the nearest change that would fit, where it does not fit."""
    plan = best_plan(inputs)
    if refused := why_unfit(inputs, plan):
        raise refused
    return plan


def best_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the fastest plan that fits, or the preferred one where none does. Live workers, and the places of their
    weights, stay where others are hardly faster. The best plans of other devices and cfg_degrees are its runners-up."""
    best, *others = ranked(inputs)
    return replace(best, runners_up=tuple(others))


def why_unfit(inputs: PlanInputs, plan: RunPlan) -> Refused | None:
    """Returns the refusal of a plan that does not fit."""
    # Where the user chose `weights` the run compares them with free memory as it borrows the workers (lease.py).
    automatic = inputs.request.weights == "auto" and not inputs.keeps_placement
    if not automatic or plan.estimate is None or plan.estimate.fits:
        return None
    return misfit(inputs.memory_of(replace(plan, entries_per_call=1)))


def alternatives(inputs: PlanInputs, plan: RunPlan) -> tuple[RunPlan, ...]:
    """Returns what auto would choose on the devices of a `plan` that the user chose: other devices and cfg_degrees."""
    if inputs.automatic_devices:
        return plan.runners_up
    request, degrees = inputs.request, plan.degrees
    if degrees.pipeline_degree * degrees.data_degree * plan.placement.nnodes > 1:
        return ()
    free = replace(request, ring_degree=0, ulysses_degree=0, cfg_degree=0, shares="auto")
    free = replace(free, devices=",".join(plan.placement.devices))
    others = ranked(replace(inputs, request=free, compared=True))
    return tuple(other for other in others if other.left_out or other.degrees.cfg_degree != degrees.cfg_degree)


def ranked(inputs: PlanInputs) -> list[RunPlan]:
    """Returns the plan to take, then the best of other devices and cfg_degrees; the preferred one if none fits."""
    plans = [replace(plan, estimate=evaluate(plan, inputs)) for plan in candidates(inputs)]
    plans.sort(key=lambda plan: plan.placement != inputs.live)
    plans = _fastest(plans, lambda plan: (plan.placement, plan.degrees), 1 / SIMILAR_RATIO)
    fast = inputs.profile is not None and inputs.profile.bytes_per_second >= ALL_TO_ALL_BYTES_PER_SECOND

    def but_for_the_sequence(plan: RunPlan) -> Hashable:
        degrees = plan.degrees
        return plan.placement, degrees.cfg_degree, degrees.data_degree, degrees.pipeline_degree

    plans = _fastest(plans, but_for_the_sequence, MAX_LOSS_TO_ULYSSES if fast else 1.0)
    fitting = [plan for plan in plans if plan.estimate and plan.estimate.fits]
    if inputs.request.pipeline_degree == 0:  # a pipeline is for weights that have no other place nearby
        usual = [plan for plan in fitting if plan.degrees.pipeline_degree == 1]
        fitting = usual if any(plan.estimate and plan.estimate.fetch_is_fast for plan in usual) else fitting
    (first,) = _fastest(fitting or plans[:1], lambda plan: None, MIN_GAIN_TO_SWITCH)
    return [first, *sorted((plan for plan in plans if plan is not first), key=lambda plan: plan.seconds)]


def _fastest(plans: Sequence[RunPlan], kind: Callable[[RunPlan], Hashable], share: float) -> list[RunPlan]:
    """Returns the first plan of each kind that takes at most 1 / `share` times the seconds of that kind's fastest."""
    kinds: dict[Hashable, list[RunPlan]] = {}
    for plan in plans:
        kinds.setdefault(kind(plan), []).append(plan)
    least = {key: min(plan.seconds for plan in group) for key, group in kinds.items()}
    return [next(plan for plan in group if plan.seconds * share <= least[key]) for key, group in kinds.items()]


def evaluate(plan: RunPlan, inputs: PlanInputs) -> Estimate:
    """Returns the seconds and bytes of `plan`, and what does not fit."""
    memory, profile, weights, degrees = inputs.memory_of(plan), inputs.profile_of(plan), plan.weights, plan.degrees
    work, compute = memory.work, 0.0
    if profile is not None and profile.flops_per_second:
        of_each = profile
        if degrees.pipeline_degree == 1 and are_measured(work, plan.placement, profile):
            of_each = averaged(work, degrees, profile)
        compute = work.prompts_per_rank(degrees) * evaluation_seconds(work, degrees, of_each)
    # The rank with the smallest shard waits longest for the others' parts.
    fetched, local, speed = 0, 0.0, 0.0
    if weights.mode != "replicate":
        fetched = memory.fetched_bytes(weights.resident_blocks)
        if profile is not None:
            speed = profile.bytes_per_second if weights.mode == "shard" else profile.host_bytes_per_second
        if weights.mode == "shard":
            local = min(part / total for part, total in memory.shard_parts(weights))
    exposed = max(0.0, (fetched * (1 - local) / speed if speed else 0.0) - compute)
    batches = inputs.work.prompts_per_rank(degrees) if plan.entries_per_call and inputs.work else 1
    return Estimate(
        weight_bytes_by_rank=memory.weight_bytes_by_rank(weights),
        activation_bytes_by_rank=memory.activation_bytes_by_rank,
        buffer_bytes_by_rank=memory.buffer_bytes_by_rank(weights),
        fits=memory.fits(weights),
        fetched_bytes=fetched,
        seconds=batches * (compute + exposed),
        batch_seconds=compute + exposed,
        exposed_seconds=exposed,
        fetch_is_fast=not 0 < speed < SLOW_LINK_BYTES_PER_SECOND,
    )


@dataclass(frozen=True, kw_only=True)
class EncoderSize:
    """The bytes of a text encoder: of its large `layers` and its `blocks` (the units of `encoder_units`), of all other
    weights, and of its activations. `staged`: may its units be on several workers?"""

    layers: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    other: int = 0
    workspace: int = 0
    staged: bool = True

    @property
    def weights(self) -> int:
        return sum(self.layers) + sum(self.blocks) + self.other


@dataclass(frozen=True, kw_only=True)
class EncoderPlacement:
    """The `ranks` that have a text encoder, the units of each (`stages`, () where each has all), and where the weights
    are between prompts; with the bytes of each of these ranks. `beside`: the models that are loaded stay."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...] = ()
    weights: WeightPlacement = REPLICATED
    weight_bytes: tuple[int, ...]
    buffer_bytes: int = 0
    beside: bool = True


def place_encoder(
    size: EncoderSize,
    beside: Sequence[int | None],
    budgets: Sequence[int | None],
    limited_by: str = "",
    *,
    prompts: int = 1,
) -> EncoderPlacement:
    """Returns the first placement that fits into the room of each worker `beside` the models that are loaded, else into
    its budget. None is no limit. Several `prompts` have a whole encoder each, where it fits beside. Raises Refused
    where it fits nowhere."""
    for rooms, copies in ((beside, min(prompts, len(beside))), (budgets, 1)):
        known = [math.inf if room is None else room for room in rooms]
        for placement in _placements(size, known, copies):
            needed = (each + placement.buffer_bytes + size.workspace for each in placement.weight_bytes)
            if all(each <= known[rank] for rank, each in zip(placement.ranks, needed, strict=True)):
                return replace(placement, beside=rooms is beside)
    raise Refused(
        "clip.misfit",
        needed=size_in_words(size.weights + size.workspace, math.ceil),
        free=size_in_words(max(known), math.floor),
        limit=say("memory.limited", limit=limited_by) if limited_by else "",
    )


def _placements(size: EncoderSize, rooms: Sequence[float], copies: int) -> Iterator[EncoderPlacement]:
    """Yields the placements by preference: whole, in stages, then offloaded."""
    by_room = sorted(range(len(rooms)), key=lambda rank: -rooms[rank])
    for workers in range(copies, 0, -1):
        yield EncoderPlacement(ranks=tuple(by_room[:workers]), weight_bytes=(size.weights,) * workers)
    units = [*(Load(each, 0) for each in size.layers), *map(Load, size.blocks)]
    for workers in range(2, len(rooms) + 1) if size.staged else ():
        if workers > len(units) or rooms[by_room[workers - 1]] <= size.other + size.workspace:
            continue
        ranks = tuple(sorted(by_room[:workers]))  # stages as equal as each worker's room allows
        free = [int(min(rooms[rank], size.weights + size.other + size.workspace)) for rank in ranks]
        stages = share_out(units, workers, [each - size.other - size.workspace for each in free])
        ends = accumulate(stages)
        parts = [units[end - count : end] for end, count in zip(ends, stages, strict=True)]
        weight_bytes = tuple(size.other + sum(unit.nbytes for unit in part) for part in parts)
        yield EncoderPlacement(ranks=ranks, stages=stages, weight_bytes=weight_bytes)
    if len(size.blocks) <= BLOCK_BUFFERS:
        return
    # As many blocks on the device as fit; without any, large layers are fetched too.
    largest, buffers = sorted(size.blocks, reverse=True), BLOCK_BUFFERS * max(size.blocks)
    room, resident = rooms[by_room[0]] - size.workspace - buffers - size.other - sum(size.layers), 0
    while resident < len(largest) - BLOCK_BUFFERS - 1 and largest[resident] <= room:
        room -= largest[resident]
        resident += 1
    kept = sum(size.layers) + sum(largest[:resident]) if resident else 0
    yield EncoderPlacement(
        ranks=(by_room[0],),
        weights=WeightPlacement(mode="offload", resident_blocks=resident),
        weight_bytes=(size.other + kept,),
        buffer_bytes=buffers + (0 if resident else max(size.layers, default=0)),
    )
