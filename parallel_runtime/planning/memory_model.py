"""Memory of each rank: weights + activations + buffers <= budget.

MemoryModel.fits decides whether a plan fits, with two reserves. ACTIVATION_RESERVE_TENSORS is what a forward needs
beside the weights, and a ControlNet once more, also where a ring's all-gather, shares and stages are chosen; a network
without a split plan counts as one without activations, as nothing tells its tokens. UNFILLED_SHARE of the budget stays
empty where `auto` fills a device with blocks, and where blocks are shared out to the stages of a pipeline if all have
so much: it is for what is not counted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..architectures.architecture import Load, share_out
from ..specs import BLOCK_BUFFERS, Parallelism, WeightPlacement, WeightsMode
from .network_stats import Work, cached_bytes_per_block, cached_key_value_bytes, outside_bytes, staged_weight_bytes
from .work_shares import in_proportion

UNFILLED_SHARE = 0.08  # of the budget stays empty where as many blocks are placed on a device as fit
# Activations at the peak of a transformer block, in tensors of [local tokens, width]: residuals, q, k, v, MLP. Up to
# half of them are buffers of ring and Ulysses attention, where they are too large to be reused.
ACTIVATION_RESERVE_TENSORS = 20
# Such tensors that a step cache keeps: of two prompts the change by the first block, and by the others.
CACHED_TENSORS = 6
ALL_GATHERED_SHARE = 1 / 8  # of the memory beside weights and activations that a ring's all-gather may use
SIMILAR_RATIO = 1.1  # budgets, and seconds of weight placements, whose ratio is no larger count as equal
FETCHED_MODES: tuple[WeightsMode, ...] = ("offload", "shard")  # by preference: an offload waits for no rank


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The memory that workers may use: `device_bytes` each of its device, `host_bytes` those of a machine of main RAM,
    together; None: no limit. Where budgets differ `ranks` has each, in rank order, and `device_bytes` is the least.

    `limited_by` names the setting that limits them, "" where free memory does."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    limited_by: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def of_each(cls, ranks: Sequence[int], *, host_bytes: int | None = None, limited_by: str = "") -> Capacity:
        uneven = tuple(ranks) if len(set(ranks)) > 1 else ()
        return cls(device_bytes=min(ranks), host_bytes=host_bytes, limited_by=limited_by, ranks=uneven)

    def budget_bytes(self, workers: int) -> tuple[int | None, ...]:
        """Returns the budget of each worker; `device_bytes` for all where `ranks` has another number of them."""
        return self.ranks if len(self.ranks) == workers else (self.device_bytes,) * workers

    def of(self, ranks: Sequence[int]) -> Capacity:
        """Returns the capacity of the workers with these ranks; () for all of them."""
        if not self.ranks or not ranks:
            return self
        budgets = [self.ranks[rank] for rank in ranks]
        return self.of_each(budgets, host_bytes=self.host_bytes, limited_by=self.limited_by)

    def at_most(self, most: int, ranks: Collection[int], workers: int) -> Capacity:
        """Returns this capacity with the budget of these ranks limited to `most` bytes."""
        known = (most if budget is None else budget for budget in self.budget_bytes(workers))
        each = [min(budget, most) if rank in ranks else budget for rank, budget in enumerate(known)]
        return self.of_each(each, host_bytes=self.host_bytes, limited_by=self.limited_by)


UNLIMITED = Capacity()


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """The memory that each rank of `degrees` needs for `work`, and may use of `capacity`. `automatic`: offload and
    shard put as many blocks on a device as fit, and leave UNFILLED_SHARE of it empty."""

    work: Work
    degrees: Parallelism
    capacity: Capacity
    automatic: bool = True

    @cached_property
    def budget_bytes_by_rank(self) -> tuple[int | None, ...]:
        return self.capacity.budget_bytes(self.degrees.world_size)

    def usable_bytes_by_rank(self, weights: WeightPlacement) -> tuple[float | None, ...]:
        """Returns the budget of each rank, less UNFILLED_SHARE where blocks fill the device."""
        share = 1 - UNFILLED_SHARE if self.automatic and weights.mode != "replicate" else 1.0
        return tuple(None if budget is None else share * budget for budget in self.budget_bytes_by_rank)

    def weight_bytes_by_rank(self, weights: WeightPlacement) -> tuple[int, ...]:
        """Returns the size of the weights on each rank's device between forwards."""
        full, ranks = self.work.network.weight_bytes, range(self.degrees.world_size)
        if weights.mode == "replicate":
            return staged_weight_bytes(self.work.network, self.degrees)
        fetched = [self.fetched_bytes(weights.resident_blocks_on(rank)) for rank in ranks]
        if weights.mode == "offload":
            return tuple(full - each for each in fetched)
        parts = zip(fetched, self.shard_parts(weights), strict=True)
        return tuple(full - each + -(-each * part // total) for each, (part, total) in parts)

    @property
    def with_one_prompt_per_batch(self) -> MemoryModel:
        """Returns this model with one prompt in a batch, where `work` has all of a rank's."""
        return replace(self, work=replace(self.work, prompts=1))

    @cached_property
    def activation_bytes_by_rank(self) -> tuple[int, ...]:
        return estimate_activation_bytes(self.work, self.degrees)

    def buffer_bytes_by_rank(self, weights: WeightPlacement) -> tuple[int, ...]:
        """Returns the bytes of the buffers for fetched blocks, and of the keys and values of token patches."""
        replicated = weights.mode == "replicate"
        return tuple(
            self._block_buffers(self.blocks if replicated else weights.resident_blocks_on(rank)) + cached
            for rank, cached in enumerate(cached_key_value_bytes(self.work, self.degrees))
        )

    def needed_bytes_by_rank(self, weights: WeightPlacement) -> tuple[int, ...]:
        """Returns the bytes of weights, activations and buffers of each rank, at the peak of an evaluation."""
        weight_bytes, buffers = self.weight_bytes_by_rank(weights), self.buffer_bytes_by_rank(weights)
        return tuple(map(sum, zip(weight_bytes, self.activation_bytes_by_rank, buffers, strict=True)))

    def fits(self, weights: WeightPlacement) -> bool:
        """Returns whether what each rank needs is within its usable budget, and an offload within main memory."""
        host, needed = self.capacity.host_bytes, self.needed_bytes_by_rank(weights)
        budgets = zip(self.usable_bytes_by_rank(weights), needed, strict=True)
        if any(budget is not None and size > budget for budget, size in budgets):
            return False
        return weights.mode != "offload" or host is None or self.fetched_bytes(weights.resident_blocks) <= host

    def allows(self, mode: WeightsMode) -> bool:
        """Returns whether weights can be placed by `mode`."""
        # Offload and shard need a split plan with blocks, and no pipeline; shard also two ranks of one sequence.
        if mode == "replicate" or self.degrees.pipeline_degree > 1:
            return mode == "replicate"
        return self.blocks > BLOCK_BUFFERS and (mode == "offload" or self.degrees.context_parallel_size > 1)

    @property
    def least_placements(self) -> list[WeightPlacement]:
        """Returns the placements that need the least memory of a device, one a mode."""
        fetched = [WeightPlacement(mode=mode) for mode in FETCHED_MODES if self.allows(mode)]
        return fetched or [WeightPlacement()]

    def most_resident(self, mode: WeightsMode) -> WeightPlacement | None:
        """Returns the placement with the most resident blocks that fits; None where it does not fit with none."""
        if not self.allows(mode):
            return None
        if mode != "shard":
            weights = self._offload_by_rank() if mode == "offload" else WeightPlacement()
            return weights if weights is not None and self.fits(weights) else None
        first = bisect_left(self._residents, True, key=lambda resident: self.fits(self.shard(resident)))
        return self.shard(self._residents[first]) if first < len(self._residents) else None

    def shard(self, resident: int) -> WeightPlacement:
        """Returns a shard with this many resident blocks. The other blocks are split in proportion to each rank's free
        memory, or equally where budgets are similar and that fits."""
        equal = WeightPlacement(mode="shard", resident_blocks=resident)
        budgets = [budget for budget in self.budget_bytes_by_rank if budget is not None]
        if len(budgets) < self.degrees.world_size:
            return equal
        if max(budgets) <= SIMILAR_RATIO * min(budgets) and self.fits(equal):
            return equal
        replicated = self.work.network.weight_bytes - self.fetched_bytes(resident)
        by_rank = zip(budgets, self.activation_bytes_by_rank, self.buffer_bytes_by_rank(equal), strict=True)
        free = [(1 - UNFILLED_SHARE) * budget - replicated - active - buffers for budget, active, buffers in by_rank]
        parts = in_proportion([max(1.0, size) for size in free])
        return replace(equal, shard_shares=parts) if len(set(parts)) > 1 else equal

    def fetched_bytes(self, resident: int) -> int:
        """Returns the size of the blocks that are fetched, with `resident` blocks on the device."""
        sizes = self.work.network.blocks
        return sum(sizes) * (len(sizes) - resident) // len(sizes) if sizes else 0

    def shard_parts(self, weights: WeightPlacement) -> list[tuple[int, int]]:
        """Returns each rank's share of a sharded block, and the sum of the shares of its cp group."""
        size = self.degrees.context_parallel_size
        parts = weights.shard_shares or (1,) * self.degrees.world_size
        return [(part, sum(parts[rank // size * size :][:size])) for rank, part in enumerate(parts)]

    def with_stages(self) -> Parallelism:
        """Returns the degrees with the blocks of each stage: the busiest computes as little as it can, where no rank
        has more of weights, and of the keys and values that patches keep, than activations leave of its budget."""
        network, degrees = self.work.network, self.degrees
        if not network.loads:
            return degrees
        cached = cached_bytes_per_block(self.work, degrees)
        loads = [Load(load.nbytes + cached * load.blocks, load.blocks) for load in network.loads]
        other = max(self.with_one_prompt_per_batch.activation_bytes_by_rank) + outside_bytes(network)
        budgets = [budget for budget in self.budget_bytes_by_rank if budget is not None]
        free = [max(0, int((1 - UNFILLED_SHARE) * budget) - other) for budget in budgets]
        ranks = degrees.world_size // degrees.pipeline_degree
        least = [min(free[first : first + ranks]) for first in range(0, len(free), ranks)]
        return replace(degrees, stages=share_out(loads, degrees.pipeline_degree, least))

    def may_all_gather(self) -> bool:
        """Returns whether a ring may all-gather its keys and values: the budget is known, and ALL_GATHERED_SHARE is
        enough for all of them, as attention reads them."""
        work, degrees, budget = self.work, self.degrees, self.capacity.device_bytes
        needed = work.network.weight_bytes + max(self.activation_bytes_by_rank)
        gathered = 2 * work.most_sequences(degrees) * work.sequence_bytes / degrees.ulysses_degree
        return budget is not None and gathered <= ALL_GATHERED_SHARE * (budget - needed)

    @property
    def blocks(self) -> int:
        return len(self.work.network.blocks)

    @property
    def _residents(self) -> range:
        """Returns the counts of resident blocks, largest first: with more, replicated weights need no more memory."""
        return range(self.blocks - BLOCK_BUFFERS - 1, -1, -1)

    def _offload_by_rank(self) -> WeightPlacement | None:
        """Returns the offload with as many resident blocks a rank as budgets allow; None where one is too small."""
        # A rank that has all blocks needs no buffers.
        full, counts = self.work.network.weight_bytes, []
        budgets = self.usable_bytes_by_rank(WeightPlacement(mode="offload"))
        for budget, active in zip(budgets, self.activation_bytes_by_rank, strict=True):
            excess = 0 if budget is None else full + active - budget
            # By the bytes saved against replicated weights.
            first = bisect_left(self._residents, excess, key=lambda n: self.fetched_bytes(n) - self._block_buffers(n))
            if excess > 0 and first == len(self._residents):
                return None
            counts.append(self._residents[first] if excess > 0 else self.blocks)
        by_rank = tuple(counts) if len(set(counts)) > 1 else ()
        return WeightPlacement(mode="offload", resident_blocks=min(counts), resident_blocks_by_rank=by_rank)

    def _block_buffers(self, resident: int) -> int:
        return BLOCK_BUFFERS * max(self.work.network.blocks) if resident < self.blocks else 0


def estimate_activation_bytes(work: Work, degrees: Parallelism) -> tuple[int, ...]:
    """Returns the estimated size of the activations of one evaluation on each rank, by its share of the tokens."""
    tensors, residuals = ACTIVATION_RESERVE_TENSORS + CACHED_TENSORS * work.cached, work.network.residuals
    if residuals:  # and a block of the ControlNet, which is split like the network's
        tensors += ACTIVATION_RESERVE_TENSORS + residuals
    sizes: list[int] = []
    for number, shares in enumerate(degrees.cp_group_shares):
        sequences = work.sequences_of_group(degrees, number // degrees.cfg_degree % degrees.data_degree)
        sizes += [tensors * work.sequence_bytes * sequences * share // sum(shares) for share in shares]
    return tuple(max(size, work.network.encode_bytes) for size in sizes)
