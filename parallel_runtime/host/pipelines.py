"""Pipelines in planning: when there can be one, which blocks each stage has, and what that holds and computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ..errors import Refused
from ..loads import Load, share_out
from ..specs import Division, Parallelism, ParallelRequest
from .cost import Figures, Work, of_a_lane

MAX_STAGES = 64
LEAST_STEPS = 8  # of a run in patches: with fewer too much changes from one to the next


def check_pipeline(request: ParallelRequest, whole: str = "") -> None:
    """Raises Refused for what a pipeline cannot be, or cannot be together with. `whole` names a network without a
    plan."""
    stages = request.pipeline_degree
    if not 0 <= stages <= MAX_STAGES:
        raise Refused(f"pipeline_degree is 0 (auto) to {MAX_STAGES}, got {stages}")
    _check_patches(request)
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


def _check_patches(request: ParallelRequest) -> None:
    exact = {"patches": 1, "warmup_steps": 1}
    if not 1 <= request.patches <= MAX_STAGES:
        raise Refused(f"patches is 1 (exact) to {MAX_STAGES}, got {request.patches}", exact)
    if request.warmup_steps < 1:
        raise Refused(f"warmup_steps, the steps that are exact, is at least 1, got {request.warmup_steps}", exact)
    if request.patches == 1:
        return
    if request.pipeline_degree < 2:
        raise Refused(
            f"patches {request.patches} would follow each other through the stages of a pipeline, and pipeline_degree "
            f"is {request.pipeline_degree}; set it to 2 or more, or patches to 1",
            exact,
        )


def check_run_in_patches(request: ParallelRequest, tokens: int, steps: int | None = None) -> None:
    """Raises Refused for a latent of so few tokens, or a run of so few steps (None: not known yet), that it cannot be
    sampled in patches."""
    if request.patches > max(1, tokens):
        raise Refused(
            f"patches is {request.patches}, and this latent makes {tokens} tokens; set patches to {max(1, tokens)} or "
            "fewer",
            {"patches": max(1, tokens)},
        )
    if request.patches == 1 or steps is None:
        return
    if steps < LEAST_STEPS:
        raise Refused(
            f"patches {request.patches} go by keys and values of the step before, and a run of {steps} step(s) changes "
            f"too much between two; take {LEAST_STEPS} steps or more, or set patches to 1"
        )
    if request.warmup_steps >= steps:
        raise Refused(
            f"warmup_steps is {request.warmup_steps} of {steps} steps, which leaves none for patches "
            f"{request.patches}; set patches to 1, or warmup_steps to fewer"
        )


def check_stages(request: ParallelRequest, figures: Figures) -> None:
    """Raises Refused where a network of these figures has no blocks for so many stages, or cannot be sampled in
    patches."""
    stages, blocks = request.pipeline_degree, len(figures.loads)
    if figures.divisible and stages > max(1, blocks):
        most = f"has {blocks} blocks for stages" if blocks else "keeps more than tokens from block to block"
        raise Refused(f"{figures.name} {most}, and pipeline_degree is {stages}; set it to {max(1, blocks)}")
    if figures.divisible and request.patches > 1 and figures.unpatched:
        raise Refused(
            f"{figures.name} has no patches, as {figures.unpatched}, and patches is {request.patches}; set it to 1",
            {"patches": 1},
        )


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


def held_bytes(figures: Figures, degrees: Parallelism) -> tuple[int, ...]:
    """Of weights, by each rank: what lies outside of blocks, and the blocks of its stage."""
    if degrees.pipeline_degree == 1:
        return (figures.weight_bytes,) * degrees.world_size
    outside, stages = outside_bytes(figures), stages_of(figures, degrees)
    return tuple(outside + stages[stage_of(degrees, rank)].nbytes for rank in range(degrees.world_size))


def balanced(division: Division, work: Work, rooms: Sequence[int | None]) -> Division:
    """With the blocks of each stage: the busiest computes as little as it can, where each rank holds no more than its
    room of `rooms`, in bytes, of weights and of what it keeps of patches; None: nobody knows."""
    degrees, figures = division.degrees, work.figures
    if degrees.pipeline_degree == 1 or not figures.loads:
        return division
    kept, outside = _kept_each(work, degrees), outside_bytes(figures)
    loads = [Load(load.nbytes + kept * load.blocks, load.blocks) for load in figures.loads]
    known = [max(0, room - outside) for room in rooms if room is not None]
    ranks = len(rooms) // degrees.pipeline_degree
    least = [min(known[first : first + ranks]) for first in range(0, len(known), ranks)]
    stages = share_out(loads, degrees.pipeline_degree, least)
    return replace(division, degrees=replace(degrees, stages=stages))


def passed_bytes(work: Work) -> int:
    """What one forward passes from a stage to the next: its tokens."""
    return work.activation_bytes // work.rows


def kept_bytes(work: Work, degrees: Parallelism) -> tuple[int, ...]:
    """What each rank keeps of patches."""
    each, ranks = _kept_each(work, degrees), range(degrees.world_size)
    if not each:
        return (0,) * len(ranks)
    stages = stages_of(work.figures, degrees)
    return tuple(each * _blocks(stages[stage_of(degrees, rank)], work) for rank in ranks)


def _blocks(stage: Stage, work: Work) -> int:
    return sum(load.blocks for load in work.figures.loads[stage.first : stage.first + stage.count])


def _kept_each(work: Work, degrees: Parallelism) -> int:
    """Of a block: keys and values of all tokens, of each evaluation of a step."""
    if degrees.patches == 1:
        return 0
    rows, branches = -(-work.rows // degrees.data_degree), -(-work.branches // degrees.cfg_degree)
    return 2 * passed_bytes(work) * rows * branches // degrees.ulysses_degree


def filled(work: Work, degrees: Parallelism) -> float:
    """The share of a step in which a stage computes: it waits while the pipeline fills and empties."""
    flights = of_a_lane(work, degrees) * degrees.patches
    return flights / (flights + degrees.pipeline_degree - 1)


def weight_shares(figures: Figures, degrees: Parallelism) -> list[tuple[float, float]]:
    """From and to, of all weights, what each stage has of its own; none where there is no pipeline."""
    if degrees.pipeline_degree == 1:
        return []
    ends = list(accumulate((stage.nbytes for stage in stages_of(figures, degrees)), initial=outside_bytes(figures)))
    return [(begin / figures.weight_bytes, end / figures.weight_bytes) for begin, end in pairwise(ends)]


def stage_of(degrees: Parallelism, rank: int) -> int:
    return rank * degrees.pipeline_degree // degrees.world_size


def blocks_of_rank(degrees: Parallelism, rank: int) -> tuple[int, int] | None:
    """The first and the last of the blocks that it has, counted from 1; None where it has all of them."""
    if not degrees.stages:
        return None
    stage = stage_of(degrees, rank)
    before = sum(degrees.stages[:stage])
    return before + 1, before + degrees.stages[stage]
