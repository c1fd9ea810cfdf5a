"""The plan of a run: the best of all candidates, or what is nearest to one that fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from ..errors import Refused
from ..specs import WeightPlacement
from .candidates import candidates
from .device_profile import DeviceProfile
from .memory_model import SIMILAR_RATIO, MemoryModel
from .misfit import misfit
from .plan_inputs import PlanInputs
from .run_plan import Estimate, RunPlan
from .seconds import COST, are_measured, averaged, evaluation_seconds

MIN_GAIN_TO_SWITCH = (
    0.95  # other workers are taken for a plan that is at least 5 % faster: less is noise, and they have to start
)
MAX_LOSS_TO_ULYSSES = (
    0.97  # of the seconds of a ring on fast links: Ulysses, which comes first, has fewer kernels and launches
)
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
    """Returns the refusal of a plan that does not fit. Where the user chose `weights` the plan refuses nothing: the run
    compares them with free memory when it borrows the workers (nodes/remote/lease.py)."""
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
    """Returns the plan to take, then the best of other devices and cfg_degrees by their seconds. Where none fits the
    preferred one is first."""
    plans = [replace(plan, estimate=evaluate(plan, inputs)) for plan in candidates(inputs)]
    plans.sort(key=lambda plan: plan.placement != inputs.live)
    plans = _fastest(plans, lambda plan: (plan.placement, plan.degrees), 1 / SIMILAR_RATIO)
    fast = inputs.profile is not None and inputs.profile.bytes_per_second >= COST.all_to_all_bytes_per_second
    plans = _fastest(plans, _kind_of, MAX_LOSS_TO_ULYSSES if fast else 1.0)
    fitting = [plan for plan in plans if plan.estimate and plan.estimate.fits]
    if inputs.request.pipeline_degree == 0:  # a pipeline is for weights that have no other place nearby
        usual = [plan for plan in fitting if plan.degrees.pipeline_degree == 1]
        fitting = usual if any(plan.estimate and plan.estimate.fetch_is_fast for plan in usual) else fitting
    (first,) = _fastest(fitting or plans[:1], lambda plan: None, MIN_GAIN_TO_SWITCH)
    return [first, *sorted((plan for plan in plans if plan is not first), key=lambda plan: plan.seconds)]


def _kind_of(plan: RunPlan) -> Hashable:
    """Returns what plans have in common that differ only in how they split a sequence."""
    degrees = plan.degrees
    return plan.placement, degrees.cfg_degree, degrees.data_degree, degrees.pipeline_degree


def _fastest(plans: Sequence[RunPlan], kind: Callable[[RunPlan], Hashable], share: float) -> list[RunPlan]:
    """Returns the first plan of each kind that takes at most 1 / `share` times the seconds of that kind's fastest."""
    kinds: dict[Hashable, list[RunPlan]] = {}
    for plan in plans:
        kinds.setdefault(kind(plan), []).append(plan)
    least = {key: min(plan.seconds for plan in group) for key, group in kinds.items()}
    return [next(plan for plan in group if plan.seconds * share <= least[key]) for key, group in kinds.items()]


def evaluate(plan: RunPlan, inputs: PlanInputs) -> Estimate:
    """Returns the seconds and bytes of `plan`, and what does not fit."""
    memory, profile, weights = inputs.memory_of(plan), inputs.profile_of(plan), plan.weights
    prompts, fetched = memory.work.prompts_per_rank(plan.degrees), 0
    if weights.mode != "replicate":
        fetched = memory.fetched_bytes(weights.resident_blocks)
    compute = prompts * _compute_seconds(plan, memory, profile)
    exposed = max(0.0, _fetch_seconds(weights, fetched, memory, profile) - compute)
    batches = inputs.work.prompts_per_rank(plan.degrees) if plan.entries_per_call and inputs.work else 1
    return Estimate(
        weight_bytes_by_rank=memory.weight_bytes_by_rank(weights),
        activation_bytes_by_rank=memory.activation_bytes_by_rank,
        buffer_bytes_by_rank=memory.buffer_bytes_by_rank(weights),
        fits=memory.fits(weights),
        fetched_bytes=fetched,
        seconds=batches * (compute + exposed),
        batch_seconds=compute + exposed,
        exposed_seconds=exposed,
        fetch_is_fast=not 0 < _fetch_speed(weights, profile) < SLOW_LINK_BYTES_PER_SECOND,
    )


def _compute_seconds(plan: RunPlan, memory: MemoryModel, profile: DeviceProfile | None) -> float:
    """Returns the seconds of one prompt; those of heterogeneous workers follow from what each measured."""
    work, degrees = memory.work, plan.degrees
    if profile is None or not profile.flops_per_second:
        return 0.0
    if degrees.pipeline_degree == 1 and are_measured(work, plan.placement, profile):
        profile = averaged(work, degrees, profile)
    return evaluation_seconds(work, degrees, profile)


def _fetch_seconds(weights: WeightPlacement, fetched: int, memory: MemoryModel, profile: DeviceProfile | None) -> float:
    """Returns the seconds in which the rank with the smallest shard fetches `fetched` bytes."""
    local = min(part / total for part, total in memory.shard_parts(weights)) if weights.mode == "shard" else 0.0
    speed = _fetch_speed(weights, profile)
    return fetched * (1 - local) / speed if speed else 0.0


def _fetch_speed(weights: WeightPlacement, profile: DeviceProfile | None) -> float:
    """Returns bytes/s; 0 where nothing is fetched or nobody has measured it."""
    if profile is None or weights.mode == "replicate":
        return 0.0
    return profile.bytes_per_second if weights.mode == "shard" else profile.host_bytes_per_second
