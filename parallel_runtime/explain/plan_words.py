"""Puts a plan into words, for CP Plan and the log: why it was chosen, shares, memory, weights, attention kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import Sentence, listed, say
from ..planning.encoder_placement import EncoderPlacement, EncoderSize
from ..planning.memory_model import Capacity, MemoryModel
from ..planning.misfit import GIB, size_in_words
from ..planning.network_stats import NetworkStats, Work
from ..planning.resolve import MIN_GAIN_TO_SWITCH
from ..planning.run_plan import Estimate, RunPlan
from ..planning.stage_blocks import outside_bytes
from ..planning.work_shares import are_uneven, work_percent
from ..request import ParallelRequest
from ..specs import BLOCK_BUFFERS, Placement, WeightPlacement

SHOWN = 4  # other plans, the best ones


def compared(plans: Sequence[RunPlan]) -> tuple[str, ...]:
    """Compares the seconds of the first plan, which is taken, with those of the best others; () where none leaves out
    a device."""
    if not any(plan.left_out for plan in plans):
        return ()
    best, *others = plans
    others.sort(key=lambda plan: (bool(plan.left_out), plan.seconds))
    sentences = [sentence for plan in others[:SHOWN] if (sentence := _other(plan, best)) is not None]
    if not sentences or not (best.seconds or math.inf in [plan.seconds for plan in plans]):
        return ()
    names = listed(list(dict.fromkeys(sentences)))
    measured = say("unlike", seconds=_seconds(best), others=names)
    first = measured if best.seconds else say("unlike.unmeasured", others=names)
    return (first, say("unlike.left", devices=", ".join(best.left_out))) if best.left_out else (first,)


def _other(plan: RunPlan, best: RunPlan) -> Sentence | None:
    if plan.seconds == math.inf:
        return None if plan.left_out else say("unlike.nowhere")
    if plan.left_out:
        key = "unlike.leave" if plan.seconds < MIN_GAIN_TO_SWITCH * best.seconds else "unlike.without"
        return say(key, device=", ".join(plan.left_out), seconds=_seconds(plan))
    return say("unlike.halves" if plan.degrees.cfg_degree == 2 else "unlike.tokens", seconds=_seconds(plan))


def _seconds(plan: RunPlan) -> str:
    return f"{plan.seconds:.2f}"


def why_replicated(request: ParallelRequest, plan: RunPlan, network: NetworkStats) -> str:
    """Says why weights are replicated that were to be elsewhere; "" where they are as requested."""
    choice, degrees = request.weights, plan.degrees
    if choice in ("auto", plan.weights.mode):
        return ""
    if len(network.blocks) <= BLOCK_BUFFERS:
        return say("note.unfetched", weights=choice, name=network.name)
    key = "note.alone" if degrees.cfg_degree * degrees.data_degree == 1 else "note.alone.each"
    return say(key, weights=choice, name=network.name)


def unused(request: ParallelRequest, plan: RunPlan, network: str) -> str:
    """Says that shares divide nothing in a network that only shares out prompts; "" where they do."""
    if plan.degrees.shares or not are_uneven(request.shares) or plan.placement.world_size == 1:
        return ""
    return say("note.unused", shares=request.shares.strip(), name=network)


def shares_in_words(plan: RunPlan) -> str:
    """Says each worker's share; "" where all have equal ones."""
    if len(set(plan.degrees.shares)) < 2:
        return ""
    percent = work_percent(plan.degrees, plan.placement)
    return say("shares", shares=", ".join(f"{device} {share} %" for device, share in percent))


def idle(plan: RunPlan) -> str:
    """Advises on workers without work; "" where there are none."""
    if 0 not in plan.degrees.shares:
        return ""
    devices = plan.placement.devices * plan.placement.nnodes
    without = [device for device, share in zip(devices, plan.degrees.shares, strict=True) if not share]
    return say("note.workless", devices=", ".join(without))


def memory(estimate: Estimate, placement: Placement, free: Sequence[int]) -> tuple[str, str]:
    """Returns the sentences on the memory that workers need at their peak."""
    each, most_weights = estimate.needed_bytes_by_rank, max(estimate.weight_bytes_by_rank)
    values = {"needed": f"{max(each) / GIB:.2f}", "weights": f"{most_weights / GIB:.2f}"}
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
        sentence = say(source, resident=plan.weights.resident_blocks, blocks=blocks, weights=weight_gib, **values)
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
    model = MemoryModel(work=work, degrees=plan.degrees, capacity=capacity).with_one_prompt_per_batch
    needed = model.needed_bytes_by_rank(WeightPlacement())
    each = list(zip(plan.placement.device_names, model.budget_bytes_by_rank, needed, strict=True))
    fitting = [device for device, budget, size in each if budget is None or size <= budget]
    if len(fitting) in (0, len(each)):
        return ""
    device, budget, size = next(one for one in each if one[1] is not None and one[2] > one[1])
    sizes = {"needed": size_in_words(size), "free": size_in_words(budget or 0)}
    return say("weights.why", fitting=", ".join(fitting), device=device, **sizes)


def _memory_of_each(placement: Placement, needed: Sequence[int], free: Sequence[int]) -> str:
    """Lists what each worker needs at its peak, and what is free for it."""
    needs = [f"{device} {size_in_words(size)}" for device, size in zip(placement.device_names, needed, strict=True)]
    if not free:
        return say("memory.each.unknown", each=", ".join(needs))
    each = (f"{one} / {size_in_words(size)}" for one, size in zip(needs, free, strict=True))
    return say("memory.each", each=", ".join(each))


def text_encoder(placed: EncoderPlacement, size: EncoderSize, devices: Sequence[str]) -> tuple[Sentence, ...]:
    """Says where a text encoder goes, and whether a network makes room for it."""
    named = [devices[rank] for rank in placed.ranks]
    each = [f"{name} {size_in_words(weights)}" for name, weights in zip(named, placed.weight_bytes, strict=True)]
    if placed.stages:
        where = say("encode.stages", parts=", ".join(each))
    elif placed.weights.mode == "offload":
        resident, blocks = placed.weights.resident_blocks, len(size.blocks)
        where = say("encode.offload", device=named[0], resident=resident, blocks=blocks)
    else:
        where = say("encode.whole", device=named[0], size=size_in_words(size.weights))
    return where, say("encode.beside" if placed.beside else "encode.instead")
