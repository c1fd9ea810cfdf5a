"""Puts the reasons of a plan into words, for CP Plan and the log: shares, devices, replicated weights, kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..accelerators import FALLBACK
from ..errors import Sentence, listed, say
from ..planning.network_stats import NetworkStats
from ..planning.resolve import CLEARLY
from ..planning.run_plan import RunPlan
from ..planning.work_shares import are_uneven, work_percent
from ..request import ParallelRequest
from ..specs import BLOCK_BUFFERS, Parallelism
from ..wire.readings import WORTH_TELLING, KernelBenchmark

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
        key = "unlike.leave" if plan.seconds < CLEARLY * best.seconds else "unlike.without"
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


def kernel_sentences(benchmarks: Sequence[KernelBenchmark], degrees: Parallelism) -> list[str]:
    """Returns a sentence on each benchmark by which auto chose kernels for these degrees."""
    if degrees.options.attention_backend != "auto":
        return []
    what = "block" if degrees.ring_degree > 1 else "full" if degrees.ulysses_degree > 1 else "alone"
    return [text for result in benchmarks if result.what == what and (text := _kernel(result))]


def _kernel(result: KernelBenchmark) -> str:
    times = dict(zip(result.kernels, result.microseconds, strict=True))
    if result.what == "alone":
        return _advice(result, times)
    fastest, *others = (_timed(name, time) for name, time in times.items())
    key = "kernel.ring" if result.what == "block" else "kernel.whole"
    if not others:
        return say(key, fastest=fastest, block=result.block)
    return say(f"{key}.before", fastest=fastest, others=listed(others), block=result.block)


def _timed(name: str, microseconds: float) -> Sentence:
    time = f"{microseconds:g}"
    return say("kernel.own", time=time) if name == FALLBACK else say("kernel.time", name=name, time=time)


def _advice(result: KernelBenchmark, times: dict[str, float]) -> str:
    """Advises a faster kernel to one worker, which keeps ComfyUI's own and its bits; "" where that gains little."""
    fastest = result.kernels[0]
    if times.get(FALLBACK, 0.0) <= WORTH_TELLING * times[fastest]:
        return ""
    values = {"own": f"{times[FALLBACK]:g}", "time": f"{times[fastest]:g}"}
    return say("kernel.advice", block=result.block, fastest=fastest, **values)
