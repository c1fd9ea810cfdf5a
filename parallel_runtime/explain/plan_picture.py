"""Draws a plan: each rank's part of the sequence, the heads and the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import listed, say
from ..planning.run_plan import RunPlan
from ..specs import Parallelism

Share = tuple[float, float]  # begin and end, as fractions of all


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one rank: its `tokens` outside of attention, its `heads` inside it. `lane` says which prompt or which
    images where these are shared out."""

    rank: int
    device: str
    tokens: Share
    heads: Share
    weights: Share
    lane: str


def parts(plan: RunPlan, *, weights: Sequence[float] = (), stages: Sequence[Share] = ()) -> list[Part]:
    """Returns the parts in rank order: ranks are numbered through pipeline, data, cfg, ring, ulysses, the last one
    fastest. `weights` is the fraction of the weights on each device, (): all of them; these are the same ones unless
    they are sharded, or of `stages`."""
    devices = plan.placement.devices * plan.placement.nnodes
    fractions = weights or (1.0,) * len(devices)
    return [_part(rank, device, plan, fractions, stages) for rank, device in enumerate(devices)]


def _part(rank: int, device: str, plan: RunPlan, weights: Sequence[float], stages: Sequence[Share]) -> Part:
    degrees, size, ulysses = plan.degrees, plan.degrees.context_parallel_size, plan.degrees.ulysses_degree
    group, index = divmod(rank, size)
    first = _first(index, weights[rank - index :][:size]) if plan.sharded else 0.0
    stage, group = divmod(group, degrees.cfg_degree * degrees.data_degree)
    data, cfg = divmod(group, degrees.cfg_degree)
    shares = degrees.cp_group_shares[group]
    return Part(
        rank=rank,
        device=device,
        tokens=_share(index, shares),
        heads=_share(rank % ulysses, [sum(shares[number::ulysses]) for number in range(ulysses)]),
        weights=stages[stage] if stages else (first, first + weights[rank]),
        lane=_lane(stage, data, cfg, degrees),
    )


def _first(index: int, weights: Sequence[float]) -> float:
    """Returns where the shard of rank `index` of a cp group begins: the first one begins with the weights, the last one
    ends with them, and they overlap in the weights that several ranks have in full."""
    before, others = sum(weights[:index]), sum(weights[:-1])
    return (1 - weights[-1]) * before / others if others else 0.0


def _share(index: int, shares: Sequence[int]) -> Share:
    return sum(shares[:index]) / sum(shares), sum(shares[: index + 1]) / sum(shares)


def _lane(stage: int, data: int, cfg: int, degrees: Parallelism) -> str:
    names = []
    if degrees.pipeline_degree > 1:
        names.append(say("lane.stage", stage=stage + 1, stages=degrees.pipeline_degree))
    if degrees.data_degree > 1:
        names.append(say("lane.images", group=data + 1, groups=degrees.data_degree))
    if degrees.cfg_degree > 1:
        names.append(say(("lane.positive", "lane.negative")[cfg]))
    return listed(names) if names else ""
