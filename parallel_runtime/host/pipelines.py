"""Pipelines in planning: when there can be one, which blocks each stage has, and what that holds and computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ..errors import Refused
from ..loads import share_out
from ..specs import Division, Parallelism, ParallelRequest
from .cost import Figures, Work, of_a_lane

MAX_STAGES = 64


def check_pipeline(request: ParallelRequest, whole: str = "") -> None:
    """Raises Refused for what a pipeline cannot be, or cannot be together with. `whole` names a network without a
    plan."""
    stages = request.pipeline_degree
    if not 0 <= stages <= MAX_STAGES:
        raise Refused(f"pipeline_degree is 0 (auto) to {MAX_STAGES}, got {stages}")
    if stages <= 1:
        return
    if whole:
        raise Refused(f"{whole} cannot be cut into stages, and pipeline_degree is {stages}; set it to 1")
    if request.ring_degree > 1:
        raise Refused(
            "a ring inside a stage of a pipeline would pass all keys and values round once more for each picture in "
            f"flight, and ring_degree is {request.ring_degree} with pipeline_degree {stages}; set ring_degree to 1 and "
            "use ulysses_degree"
        )
    if request.weights in ("shard", "offload"):
        raise Refused(
            f"weights {request.weights}: a stage of a pipeline has its own blocks alone, all of them on its device, "
            f"and pipeline_degree is {stages}; set weights to auto, or pipeline_degree to 1"
        )
    if request.shares not in ("auto", "equal"):
        raise Refused(
            f"shares {request.shares}: workers of a pipeline pass equal parts on, and pipeline_degree is {stages}; set "
            "shares to equal, or pipeline_degree to 1"
        )
    if request.step_cache:
        raise Refused(
            f"step_cache {request.step_cache:g}: no stage of a pipeline sees all blocks, and pipeline_degree is "
            f"{stages}; set step_cache to 0, or pipeline_degree to 1"
        )


def check_stages(request: ParallelRequest, figures: Figures) -> None:
    """Raises Refused where a network of these figures has no blocks for so many stages."""
    stages, blocks = request.pipeline_degree, len(figures.loads)
    if figures.divisible and stages > max(1, blocks):
        most = f"has {blocks} blocks for stages" if blocks else "keeps more than tokens from block to block"
        raise Refused(f"{figures.name} {most}, and pipeline_degree is {stages}; set it to {max(1, blocks)}")


@dataclass(frozen=True)
class Stage:
    """What the ranks of one stage have: units from `first` on, their bytes, and their share of all work."""

    first: int
    count: int
    nbytes: int
    work: float


def stages_of(figures: Figures, degrees: Parallelism) -> list[Stage]:
    """In order; one that has it all where there is no pipeline, none where no plan knows blocks."""
    loads = figures.loads
    if not loads:
        return []
    counts = degrees.stages or share_out(loads, degrees.pipeline_degree)
    total, first, stages = sum(load.blocks for load in loads), 0, []
    for count in counts:
        own = loads[first : first + count]
        nbytes, work = sum(load.nbytes for load in own), sum(load.blocks for load in own) / total
        stages.append(Stage(first, count, nbytes, work))
        first += count
    return stages


def outside_bytes(figures: Figures) -> int:
    """Of weights that every stage has."""
    return figures.weight_bytes - sum(load.nbytes for load in figures.loads)


def held_bytes(figures: Figures, degrees: Parallelism) -> int:
    """Of weights, by the fullest stage."""
    if degrees.pipeline_degree == 1:
        return figures.weight_bytes
    return outside_bytes(figures) + max(stage.nbytes for stage in stages_of(figures, degrees))


def balanced(division: Division, figures: Figures, room: int | None) -> Division:
    """With the blocks of each stage: the busiest computes as little as it can, where each holds no more than `room`
    bytes of weights; None: nobody knows."""
    degrees = division.degrees
    if degrees.pipeline_degree == 1 or not figures.loads:
        return division
    inside = None if room is None else max(0, room - outside_bytes(figures))
    stages = share_out(figures.loads, degrees.pipeline_degree, inside)
    return replace(division, degrees=replace(degrees, stages=stages))


def passed_bytes(work: Work) -> int:
    """What one forward passes from a stage to the next: its tokens."""
    return work.activation_bytes // work.rows


def filled(work: Work, degrees: Parallelism) -> float:
    """The share of a step in which a stage computes: it waits while the pipeline fills and empties."""
    flights = of_a_lane(work, degrees)
    return flights / (flights + degrees.pipeline_degree - 1)


def weight_shares(figures: Figures, degrees: Parallelism) -> list[tuple[float, float]]:
    """From and to, of all weights, what each stage has of its own; none where there is no pipeline."""
    if degrees.pipeline_degree == 1:
        return []
    ends = list(accumulate((stage.nbytes for stage in stages_of(figures, degrees)), initial=outside_bytes(figures)))
    return [(begin / figures.weight_bytes, end / figures.weight_bytes) for begin, end in pairwise(ends)]


def blocks_of_rank(degrees: Parallelism, rank: int) -> tuple[int, int] | None:
    """The first and the last of the blocks that it has, counted from 1; None where it has all of them."""
    if not degrees.stages:
        return None
    stage = rank * degrees.pipeline_degree // degrees.world_size
    before = sum(degrees.stages[:stage])
    return before + 1, before + degrees.stages[stage]
