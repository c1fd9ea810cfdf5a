"""Puts the memory of a plan into words, for CP Plan: weights, workspace, and how both differ between workers."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import say
from ..planning.memory_model import Capacity, MemoryModel
from ..planning.misfit import GIB, size_in_words
from ..planning.network_stats import Work
from ..planning.run_plan import Estimate, RunPlan
from ..planning.stage_blocks import outside_bytes
from ..specs import Placement, WeightPlacement


def placed(plan: RunPlan, work: Work, capacity: Capacity) -> Estimate:
    """Returns the plan's estimate, or that of replicated weights where the plan has none."""
    if plan.estimate is not None:
        return plan.estimate
    model = MemoryModel(work=work, degrees=plan.degrees, capacity=capacity)
    return Estimate(
        weight_bytes_by_rank=model.weight_bytes_by_rank(WeightPlacement()),
        activation_bytes_by_rank=model.activation_bytes_by_rank,
        buffer_bytes_by_rank=model.buffer_bytes_by_rank(WeightPlacement()),
    )


def memory(estimate: Estimate, placement: Placement, free: Sequence[int]) -> tuple[str, str]:
    """Returns the sentences on the memory that workers need at their peak."""
    each, most_weights = estimate.needed_bytes_by_rank, max(estimate.weight_bytes_by_rank)
    values = {"needed": f"{max(each) / GIB:.2f}", "held": f"{most_weights / GIB:.2f}"}
    most = say("memory", **values, free=f"{min(free) / GIB:.2f}") if free else say("memory.unknown", **values)
    return most, _memory_of_each(placement, each, free) if len(set(each)) > 1 else ""


def weights(plan: RunPlan, work: Work, capacity: Capacity) -> tuple[str, ...]:
    """Returns the sentences on the weights that workers have, those that they fetch, and how long they wait for
    them."""
    estimate, mode, degrees = plan.estimate, plan.weights.mode, plan.degrees
    if estimate is None:
        return ()
    if degrees.pipeline_degree > 1:
        return (say("weights.stages", outside=size_in_words(outside_bytes(work.network))),)
    if not estimate.fetched_bytes:
        return (say("weights.whole", mode=mode),)
    values = {"mode": mode, "workers": degrees.context_parallel_size, "fetched": f"{estimate.fetched_bytes / GIB:.2f}"}
    source, blocks = "weights.fetched" if mode == "offload" else "weights.gathered", len(work.network.blocks)
    if len(set(estimate.weight_bytes_by_rank)) > 1:
        sentence = say(f"{source}.each", each=_weights_of_each(plan, estimate, blocks), **values)
    else:
        weight_gib = f"{max(estimate.weight_bytes_by_rank) / GIB:.2f}"
        sentence = say(source, resident=plan.weights.resident_blocks, blocks=blocks, held=weight_gib, **values)
    return sentence, _why_not_replicated(plan, work, capacity), _fetching(plan, work, estimate)


def _fetching(plan: RunPlan, work: Work, estimate: Estimate) -> str:
    if not estimate.batch_seconds:
        return say("weights.unmeasured")
    prompts = 1 if plan.entries_per_call else work.prompts_per_rank(plan.degrees)
    key = ("weights.waits" if estimate.exposed_seconds else "weights.hidden") + (".one" if prompts == 1 else "")
    seconds = {"seconds": f"{estimate.batch_seconds:.2f}", "exposed": f"{estimate.exposed_seconds:.2f}"}
    return say(key, prompts=prompts, **seconds)


def _weights_of_each(plan: RunPlan, estimate: Estimate, blocks: int) -> str:
    """Lists each worker's weights at rest, and its number of resident blocks."""
    each = []
    for rank, (device, size) in enumerate(zip(plan.placement.device_names, estimate.weight_bytes_by_rank, strict=True)):
        each.append(f"{device} {size_in_words(size)} ({plan.weights.resident_blocks_on(rank)}/{blocks})")
    return ", ".join(each)


def _why_not_replicated(plan: RunPlan, work: Work, capacity: Capacity) -> str:
    """Says which devices replicated weights would fit, and which not; "" where they fit all or none."""
    model = MemoryModel(work=work, degrees=plan.degrees, capacity=capacity).one_by_one
    needed = model.needed_bytes_by_rank(WeightPlacement())
    each = list(zip(plan.placement.device_names, model.budget_bytes_by_rank, needed, strict=True))
    fitting = [device for device, budget, size in each if budget is None or size <= budget]
    if len(fitting) in (0, len(each)):
        return ""
    device, budget, size = next(one for one in each if one[1] is not None and one[2] > one[1])
    sizes = {"needed": size_in_words(size), "room": size_in_words(budget or 0)}
    return say("weights.why", fitting=", ".join(fitting), device=device, **sizes)


def _memory_of_each(placement: Placement, needed: Sequence[int], free: Sequence[int]) -> str:
    """Lists what each worker needs at its peak, and what is free for it."""
    needs = [f"{device} {size_in_words(size)}" for device, size in zip(placement.device_names, needed, strict=True)]
    if not free:
        return say("memory.each.unknown", each=", ".join(needs))
    each = (f"{one} / {size_in_words(size)}" for one, size in zip(needs, free, strict=True))
    return say("memory.each", each=", ".join(each))
