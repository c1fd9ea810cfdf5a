"""The blocks of each stage of a pipeline, with their weights and work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..architectures.architecture import share_out
from ..specs import Parallelism
from .network_stats import NetworkStats, Work


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of one stage: `count` units of them from `first` on, their bytes, how many blocks tokens pass, and
    their share of all work."""

    first: int
    count: int
    nbytes: int
    layers: int
    work: float


def stages_of(network: NetworkStats, degrees: Parallelism) -> list[StageBlocks]:
    """Returns the stages in order; a single one where there is no pipeline, none where no plan knows blocks."""
    loads = network.loads
    if not loads:
        return []
    counts = degrees.stages or share_out(loads, degrees.pipeline_degree)
    total, first, stages = sum(load.blocks for load in loads), 0, []
    for count in counts:
        units = loads[first : first + count]
        nbytes, layers = sum(load.nbytes for load in units), sum(load.blocks for load in units)
        stages.append(StageBlocks(first, count, nbytes, layers, layers / total))
        first += count
    return stages


def outside_bytes(network: NetworkStats) -> int:
    """Returns the size of the weights outside of blocks, which every stage has."""
    return network.weight_bytes - sum(load.nbytes for load in network.loads)


def staged_weight_bytes(network: NetworkStats, degrees: Parallelism) -> tuple[int, ...]:
    """Returns the size of the weights of each rank: what lies outside of blocks, and the blocks of its stage."""
    if degrees.pipeline_degree == 1:
        return (network.weight_bytes,) * degrees.world_size
    outside, stages = outside_bytes(network), stages_of(network, degrees)
    return tuple(outside + stages[stage_of(degrees, rank)].nbytes for rank in range(degrees.world_size))


def cached_key_value_bytes(work: Work, degrees: Parallelism) -> tuple[int, ...]:
    """Returns the size of the keys and values that each rank keeps from step to step where tokens come in patches."""
    each, stages = cached_bytes_per_block(work, degrees), stages_of(work.network, degrees)
    return tuple(each and each * stages[stage_of(degrees, rank)].layers for rank in range(degrees.world_size))


def cached_bytes_per_block(work: Work, degrees: Parallelism) -> int:
    """Returns the size of the keys and values of all tokens in one block, of each evaluation of a step."""
    if degrees.options.token_patches == 1:
        return 0
    sequences, branches = -(-work.sequences // degrees.data_degree), -(-work.branches // degrees.cfg_degree)
    return 2 * work.sequence_bytes * sequences * branches // degrees.ulysses_degree


def busy_share(work: Work, degrees: Parallelism) -> float:
    """Returns the share of a step in which a stage computes: it waits while the pipeline fills and empties."""
    flights = work.most_sequences(degrees) * degrees.options.token_patches
    return flights / (flights + degrees.pipeline_degree - 1)


def weight_ranges(network: NetworkStats, degrees: Parallelism) -> list[tuple[float, float]]:
    """Returns the weights that each stage has of its own, as a range of all weights; [] where there is no pipeline."""
    if degrees.pipeline_degree == 1:
        return []
    ends = list(accumulate((stage.nbytes for stage in stages_of(network, degrees)), initial=outside_bytes(network)))
    return [(begin / network.weight_bytes, end / network.weight_bytes) for begin, end in pairwise(ends)]


def stage_of(degrees: Parallelism, rank: int) -> int:
    return rank * degrees.pipeline_degree // degrees.world_size


def blocks_of_rank(degrees: Parallelism, rank: int) -> tuple[int, int] | None:
    """Returns the first and the last of the blocks that the rank has, counted from 1; None where it has all of them."""
    if not degrees.stages:
        return None
    stage = stage_of(degrees, rank)
    before = sum(degrees.stages[:stage])
    return before + 1, before + degrees.stages[stage]
