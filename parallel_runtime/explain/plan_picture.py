"""A plan to look at: which rank holds which part of sequence, heads and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.run_plan import RunPlan
from ..sentences import listed, say
from ..specs import Parallelism

Share = tuple[float, float]  # from and to, of the whole


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank holds. `tokens` outside of attention, `heads` inside it; `lane` says which prompt or which images
    where these are shared out."""

    rank: int
    device: str
    tokens: Share
    heads: Share
    weights: Share
    lane: str


def parts(
    plan: RunPlan, *, sharded: bool = False, held: Sequence[float] = (), stages: Sequence[Share] = ()
) -> list[Part]:
    """In rank order. Ranks are numbered through pipeline, data, cfg, ring, ulysses, the last one fastest. `held` is the
    share of the weights that each device has, none: all; the same ones unless they are `sharded`, or of `stages`."""
    devices = plan.placement.devices * plan.placement.nnodes
    each = held or (1.0,) * len(devices)
    return [_part(rank, device, plan.degrees, sharded, each, stages) for rank, device in enumerate(devices)]


def _part(
    rank: int, device: str, degrees: Parallelism, sharded: bool, held: Sequence[float], stages: Sequence[Share]
) -> Part:
    lane, place = divmod(rank, degrees.context_parallel_size)
    first = _first(place, held[rank - place :][: degrees.context_parallel_size]) if sharded else 0.0
    stage, lane = divmod(lane, degrees.cfg_degree * degrees.data_degree)
    data, cfg = divmod(lane, degrees.cfg_degree)
    return Part(
        rank=rank,
        device=device,
        tokens=_share(place, degrees.cp_group_shares[lane]),
        heads=_share(rank % degrees.ulysses_degree, _of_heads(degrees, lane)),
        weights=stages[stage] if stages else (first, first + held[rank]),
        lane=_lane(stage, data, cfg, degrees),
    )


def _first(place: int, held: Sequence[float]) -> float:
    """Where the part of a shard begins that this rank of a lane has: the first's with the weights, the last's ends with
    them, and what several have whole is where parts overlap."""
    before, others = sum(held[:place]), sum(held[:-1])
    return (1 - held[-1]) * before / others if others else 0.0


def _of_heads(degrees: Parallelism, lane: int) -> tuple[int, ...]:
    """Of all ranks of a ring that have the same heads."""
    shares = degrees.cp_group_shares[lane]
    return tuple(sum(shares[place :: degrees.ulysses_degree]) for place in range(degrees.ulysses_degree))


def _share(index: int, shares: tuple[int, ...]) -> Share:
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
