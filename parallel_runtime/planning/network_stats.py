"""A network in numbers, what a run asks of it, the blocks of each stage of a pipeline, with their weights and work, and
each worker's share of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

from ..architectures.network_modules import Load, share_out
from ..architectures.row_plan import RowLevel
from ..specs import Parallelism

ANY_HEADS = 5040  # divides well; for an unknown model, and for a VAE, which has no heads to share out
LAYER_WEIGHTS = 12  # widths squared: the weights of a layer that a token passes. Modulation is of whole pictures.
SHARE_PARTS = 64  # of the work, for each worker


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of one stage: `count` units from `first` on, their bytes, blocks that tokens pass, share of work."""

    first: int
    count: int
    nbytes: int
    layers: int
    work: float


@dataclass(frozen=True, kw_only=True)
class NetworkStats:
    """A network in numbers; without a `name` one that is not known yet.

    `divisible`: a split plan says how its sequence is split; `step_cacheable`: a step cache may leave its blocks out.
    `images_coupled`: it sees all images of a prompt at once, so workers may share out prompts only. `no_lse`: the name
    of an attention that a user chose, or that blocks have of their own, and that gives no log-sum-exp to merge blocks
    by; else "".
    `width` is heads x head size. `weights` is a count, `item_bytes` the size of one computed number. `weight_bytes` is
    the size in the file's format, with model patches, ControlNets and their VAEs, which every rank has in full.
    `blocks` are the bytes of each block of the split plan, `loads` the units that a pipeline's stages share out;
    `why_not_in_patches` is the reason why its tokens cannot go through one token patch after the other, "" if they can.
    `residuals` is the number of tensors of all tokens that its ControlNets give, of which each rank has its part.
    `encode_bytes` is what a VAE takes to encode a picture, before an evaluation or in one. `row_levels` are those of a
    network that is split by rows, each with a quarter of the pixels of the one before."""

    name: str = ""
    divisible: bool = True
    step_cacheable: bool = True
    images_coupled: bool = False
    no_lse: str = ""
    heads: int = ANY_HEADS
    layers: int = 0
    width: int = 0
    weights: int = 0
    weight_bytes: int = 0
    item_bytes: int = 2
    blocks: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()
    why_not_in_patches: str = ""
    residuals: int = 0
    encode_bytes: int = 0
    row_levels: tuple[RowLevel, ...] = ()

    def undivided(self, name: str) -> NetworkStats:
        """Returns this network where nothing of it is split or skipped."""
        counts: dict[str, Any] = {"heads": 1, "layers": 0, "width": 0, "blocks": (), "loads": (), "row_levels": ()}
        return replace(self, name=name, divisible=False, step_cacheable=False, **counts)

    def halved(self) -> NetworkStats:
        """Returns this network with weights of half the size."""
        blocks, loads = (size // 2 for size in self.blocks), (Load(x.nbytes // 2, x.blocks) for x in self.loads)
        return replace(self, weight_bytes=self.weight_bytes // 2, blocks=tuple(blocks), loads=tuple(loads))

    def work(
        self, sequences: int, tokens: int, *, prompts: int = 1, cached: bool = False, recorded: bool = False
    ) -> Work:
        """Returns one evaluation of `sequences` of `tokens`, of each of this many `prompts`."""
        at_once = {"prompts": 1 if cached else prompts, "branches": prompts}
        return Work(network=self, sequences=sequences, tokens=tokens, cached=cached, recorded=recorded, **at_once)

    def linear_flop(self, tokens: int) -> float:
        """Returns the FLOP of all products with weights, for one sequence."""
        if self.row_levels:
            return sum(2 * level.weights * tokens / 4**number for number, level in enumerate(self.row_levels))
        # Every token is multiplied by the weights of its layers alone, or by all where there are none.
        weights = min(self.weights, LAYER_WEIGHTS * self.layers * self.width**2) if self.layers else self.weights
        return 2 * weights * tokens

    def attention_flop(self, tokens: int) -> float:
        """Returns the FLOP of all attentions, for one sequence."""
        if self.row_levels:
            levels = enumerate(self.row_levels)
            return sum(4 * level.attentions * level.width * (tokens / 4**number) ** 2 for number, level in levels)
        return 4 * tokens**2 * self.width * self.layers

    @property
    def outside_bytes(self) -> int:
        """Returns the size of the weights outside of blocks, which every stage has."""
        return self.weight_bytes - sum(load.nbytes for load in self.loads)

    def stages(self, degrees: Parallelism) -> list[StageBlocks]:
        """Returns the stages in order; a single one where there is no pipeline, none where no plan knows blocks."""
        if not self.loads:
            return []
        total, first, stages = sum(load.blocks for load in self.loads), 0, []
        for count in degrees.stages or share_out(self.loads, degrees.pipeline_degree):
            units = self.loads[first : first + count]
            nbytes, layers = sum(load.nbytes for load in units), sum(load.blocks for load in units)
            stages.append(StageBlocks(first, count, nbytes, layers, layers / total))
            first += count
        return stages

    def weight_ranges(self, degrees: Parallelism) -> list[tuple[float, float]]:
        """Returns the weights that each stage has of its own, as a range of all weights; [] without a pipeline."""
        if degrees.pipeline_degree == 1:
            return []
        ends = list(accumulate((stage.nbytes for stage in self.stages(degrees)), initial=self.outside_bytes))
        return [(begin / self.weight_bytes, end / self.weight_bytes) for begin, end in pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One evaluation of `tokens` of all streams together. `cached`: with a step cache; `recorded`: its launches are
    replayed. Workers evaluate `prompts` in one batch, of the `branches` of a step, unless cfg_degree shares them
    out. At most `row_ranks` can share a picture that is split by rows."""

    network: NetworkStats
    tokens: int
    sequences: int = 1
    prompts: int = 1
    branches: int = 1
    cached: bool = False
    recorded: bool = False
    row_ranks: int = 0

    @property
    def tensor_bytes(self) -> int:
        """Returns the size of one activation tensor of all sequences, of all their tokens."""
        return self.sequences * self.sequence_bytes

    @property
    def sequence_bytes(self) -> int:
        """Returns the size of one activation tensor of one sequence: what a stage of a pipeline passes to the next."""
        return self.tokens * self.network.width * self.network.item_bytes

    def prompts_per_rank(self, degrees: Parallelism) -> int:
        return -(-self.prompts // degrees.cfg_degree)

    def sequences_of_group(self, degrees: Parallelism, group: int) -> int:
        """Returns the sequences of all prompts together that this one of the data_degree groups evaluates in a step."""
        shares = degrees.data_group_shares
        return -(-self.sequences * shares[group] // sum(shares)) * self.prompts_per_rank(degrees)

    def most_sequences(self, degrees: Parallelism) -> int:
        """Returns the sequences of the group that has most; through a pipeline's stages they follow each other."""
        return max(self.sequences_of_group(degrees, group) for group in range(degrees.data_degree))

    def cached_bytes_per_block(self, degrees: Parallelism) -> int:
        """Returns the size of the keys and values of all tokens in one block, of each evaluation of a step, that are
        kept from step to step where tokens come in patches."""
        if degrees.options.token_patches == 1:
            return 0
        sequences, branches = -(-self.sequences // degrees.data_degree), -(-self.branches // degrees.cfg_degree)
        return 2 * self.sequence_bytes * sequences * branches // degrees.ulysses_degree

    def cached_bytes_by_rank(self, degrees: Parallelism) -> tuple[int, ...]:
        """Returns the size of the keys and values that each rank keeps, in all of its blocks."""
        each, stages = self.cached_bytes_per_block(degrees), self.network.stages(degrees)
        return tuple(each and each * stages[degrees.stage_of(rank)].layers for rank in range(degrees.world_size))

    def busy_share(self, degrees: Parallelism) -> float:
        """Returns the share of a step in which a stage computes: it waits while the pipeline fills and empties."""
        flights = self.most_sequences(degrees) * degrees.options.token_patches
        return flights / (flights + degrees.pipeline_degree - 1)


def in_proportion(to: Sequence[float]) -> tuple[int, ...]:
    """Returns whole numbers in proportion to these, about SHARE_PARTS for each; a positive number stays positive."""
    mean = sum(to) / len(to)
    sizes = [max(round(SHARE_PARTS * one / mean), int(one > 0)) for one in to]
    common = gcd(*sizes)
    return tuple(size // common for size in sizes)


def shares_within(total: int, budget_bytes: Sequence[int | None]) -> tuple[int, ...]:
    """Returns shares of what takes `total` bytes on all workers together: equal, but none above its budget (None: no
    limit); where all budgets are too small, in proportion to them. () where all are equal."""
    limits = sorted(total if budget is None else max(0, budget) for budget in budget_bytes)
    remaining, level = total, 0.0
    for number, limit in enumerate(limits):
        level = remaining / (len(limits) - number)
        if limit >= level:
            break
        remaining -= limit
    if limits[0] >= level or not limits[-1]:
        return ()
    return in_proportion([level if budget is None else min(max(0, budget), level) for budget in budget_bytes])
