"""A plan to look at: which rank holds which part of sequence, heads and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..specs import Division, Parallelism
from .sentences import listed, say

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


def parts(division: Division, *, sharded: bool = False, held: float = 1.0, stages: Sequence[Share] = ()) -> list[Part]:
    """In rank order. Ranks are numbered through pipeline, data, cfg, ring, ulysses, the last one fastest. `held` is the
    share of the weights that each device has, the same one unless they are `sharded`, or of `stages`."""
    devices = division.placement.devices * division.placement.nnodes
    return [_part(rank, device, division.degrees, sharded, held, stages) for rank, device in enumerate(devices)]


def _part(rank: int, device: str, degrees: Parallelism, sharded: bool, held: float, stages: Sequence[Share]) -> Part:
    lane, place = divmod(rank, degrees.context_parallel_size)
    stage, lane = divmod(lane, degrees.cfg_degree * degrees.data_degree)
    first = (1 - held) * place / max(1, degrees.context_parallel_size - 1) if sharded else 0.0
    data, cfg = divmod(lane, degrees.cfg_degree)
    return Part(
        rank=rank,
        device=device,
        tokens=_share(place, degrees.lanes[lane]),
        heads=_share(rank % degrees.ulysses_degree, _of_heads(degrees, lane)),
        weights=stages[stage] if stages else (first, first + held),
        lane=_lane(stage, data, cfg, degrees),
    )


def _of_heads(degrees: Parallelism, lane: int) -> tuple[int, ...]:
    """Of all ranks of a ring that have the same heads."""
    shares = degrees.lanes[lane]
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
