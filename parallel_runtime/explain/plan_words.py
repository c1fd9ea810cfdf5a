"""Why a plan is as it is, in words for CP Plan and the log: shares, other devices, weights that are whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..planning.memory_model import BLOCK_BUFFERS
from ..planning.network_stats import NetworkStats
from ..planning.resolve import CLEARLY
from ..planning.run_plan import RunPlan
from ..planning.work_shares import are_uneven, work_percent
from ..request import ParallelRequest
from ..sentences import Sentence, listed, say

SHOWN = 4  # other plans, the best ones


def compared(plans: Sequence[RunPlan]) -> tuple[str, ...]:
    """The seconds of the first plan, which is taken, and of the best others; nothing where devices are alike."""
    if not any(plan.left_out for plan in plans):
        return ()
    best, *rest = plans
    others = sorted(rest, key=lambda plan: (bool(plan.left_out), plan.seconds))
    told = [said for plan in others[:SHOWN] if (said := _other(plan, best)) is not None]
    if not told or not (best.seconds or math.inf in [plan.seconds for plan in plans]):
        return ()
    names = listed(list(dict.fromkeys(told)))
    measured = say("unlike", seconds=_seconds(best), others=names)
    first = measured if best.seconds else say("unlike.unmeasured", others=names)
    return (first, say("unlike.left", devices=", ".join(best.left_out))) if best.left_out else (first,)


def _other(plan: RunPlan, best: RunPlan) -> Sentence | None:
    """A plan that was not taken."""
    if plan.seconds == math.inf:
        return None if plan.left_out else say("unlike.nowhere")
    if plan.left_out:
        key = "unlike.leave" if plan.seconds < CLEARLY * best.seconds else "unlike.without"
        return say(key, device=", ".join(plan.left_out), seconds=_seconds(plan))
    return say("unlike.halves" if plan.degrees.cfg_degree == 2 else "unlike.tokens", seconds=_seconds(plan))


def _seconds(plan: RunPlan) -> str:
    return f"{plan.seconds:.2f}"


def why_replicated(request: ParallelRequest, plan: RunPlan, network: NetworkStats) -> str:
    """Why weights that were to be elsewhere are whole on every device; "" where they are as asked."""
    choice, degrees = request.weights, plan.degrees
    if choice in ("auto", plan.weights.mode):
        return ""
    if len(network.blocks) <= BLOCK_BUFFERS:
        return say("note.unfetched", weights=choice, name=network.name)
    key = "note.alone" if degrees.cfg_degree * degrees.data_degree == 1 else "note.alone.each"
    return say(key, weights=choice, name=network.name)


def unused(request: ParallelRequest, plan: RunPlan, network: str) -> str:
    """That numbers have nothing to divide in a network that only shares out prompts; "" where they have."""
    if plan.degrees.shares or not are_uneven(request.shares) or plan.placement.world_size == 1:
        return ""
    return say("note.unused", shares=request.shares.strip(), name=network)


def shares_in_words(plan: RunPlan) -> str:
    """Each worker's share; "" where all have alike."""
    if len(set(plan.degrees.shares)) < 2:
        return ""
    percent = work_percent(plan.degrees, plan.placement)
    return say("shares", shares=", ".join(f"{device} {share} %" for device, share in percent))


def idle(plan: RunPlan) -> str:
    """What to do about workers without work; "" where there are none."""
    if 0 not in plan.degrees.shares:
        return ""
    devices = plan.placement.devices * plan.placement.nnodes
    without = [device for device, share in zip(devices, plan.degrees.shares, strict=True) if not share]
    return say("note.workless", devices=", ".join(without))
