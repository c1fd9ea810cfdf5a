"""What cards of unlike speed come to: seconds for all prompts with the tokens by shares, with a prompt for each half,
and without the slowest card. Arithmetic only."""

from __future__ import annotations

from dataclasses import replace

from ..specs import Division, Parallelism, Placement
from .cost import ATTENTION, Link, Speed, Work, alone_seconds, evaluation_seconds
from .sentences import listed, say
from .shares import in_proportion

APART = 1.1  # times the mean, in which the slowest worker would do it all: what is less is the noise of a measurement
WORTH_SAYING = 0.95


def are_unlike(work: Work, placement: Placement, link: Link) -> bool:
    """Did these workers measure that? Those that share a device take its time from each other."""
    alone = [alone_seconds(work, speed) for speed in link.ranks]
    return are_known(work, placement, link) and max(alone) > APART * sum(alone) / len(alone)


def are_known(work: Work, placement: Placement, link: Link) -> bool:
    """Did each measure how fast it is by itself?"""
    if placement.shared or len(link.ranks) != placement.world_size:
        return False
    return all(alone_seconds(work, speed) for speed in link.ranks)


def by_speed(work: Work, link: Link) -> tuple[int, ...]:
    """Shares in proportion to what each of these workers measured."""
    return in_proportion([1 / alone_seconds(work, speed) for speed in link.ranks])


def seconds(work: Work, degrees: Parallelism, link: Link) -> float:
    """Of evaluating all prompts."""
    once = evaluation_seconds(work, degrees, together(work, degrees, link))
    return -(-work.prompts // degrees.cfg_degree) * once


def together(work: Work, degrees: Parallelism, link: Link) -> Link:
    """The same with the speed of one of so many like workers. Ranks of a sequence have shares by their speed, and the
    slowest lane is waited for."""
    each = degrees.context_parallel_size
    alone = [alone_seconds(work, speed) for speed in link.ranks]
    lanes = [alone[first : first + each] for first in range(0, len(alone), each)]
    slowest = max(each / sum(1 / one for one in lane) for lane in lanes)
    return replace(link, flops_per_second=alone_seconds(work, Speed(products=1.0, attention=ATTENTION)) / slowest)


def compared(work: Work, division: Division, link: Link | None) -> str:
    """For CP Plan: the seconds of this way and of the others; "" where cards are alike."""
    if link is None or not link.bytes_per_second or not are_unlike(work, division.placement, link):
        return ""
    degrees, devices = division.degrees, division.placement.devices * division.placement.nnodes
    if degrees.pipeline_degree * degrees.data_degree > 1:
        return ""
    here, told = seconds(work, degrees, link), []
    ranks = degrees.world_size
    if work.prompts > 1 and ranks % 2 == 0:
        key = "unlike.shares" if degrees.cfg_degree == 2 else "unlike.halves"
        other = Parallelism(ring_degree=ranks // (3 - degrees.cfg_degree), cfg_degree=3 - degrees.cfg_degree)
        told.append(say(key, seconds=f"{seconds(work, other, link):.2f}"))
    alone = [alone_seconds(work, speed) for speed in link.ranks]
    slowest = alone.index(max(alone))
    others = replace(link, ranks=tuple(speed for rank, speed in enumerate(link.ranks) if rank != slowest))
    without = seconds(work, Parallelism(ring_degree=ranks - 1), others)
    key = "unlike.leave" if without < WORTH_SAYING * here else "unlike.without"
    told.append(say(key, device=devices[slowest], seconds=f"{without:.2f}"))
    return say("unlike", seconds=f"{here:.2f}", others=listed(told))
