"""Memory of each rank: weights + activations + buffers <= budget.

MemoryModel.fits decides whether a plan fits, with two reserves. ACTIVATION_RESERVE_TENSORS is what a forward needs
beside the weights, and a ControlNet once more, also where a ring's all-gather, shares and stages are chosen; a network
without a split plan counts as one without activations, as nothing tells its tokens. UNFILLED_SHARE of the budget stays
empty where `auto` fills a device with blocks, and where blocks are shared out to the stages of a pipeline if all have
so much: it is for what is not counted.

`misfit` says what is missing while planning, with the nearest change that would fit, and `shortage` which device lacks
memory for a plan at this moment (nodes/remote/lease.py refuses with `memory.taken`)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..architectures.network_modules import Load, share_out
from ..errors import Refused, Sentence, say
from ..specs import BLOCK_BUFFERS, Parallelism, Placement, WeightPlacement, WeightsMode
from ..wire.messages import Readings
from .network_stats import Work, in_proportion

GIB = 2**30
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
            if self.degrees.pipeline_degree == 1:
                return (full,) * self.degrees.world_size
            # What lies outside of blocks, and the blocks of its stage.
            outside, stages = self.work.network.outside_bytes, self.work.network.stages(self.degrees)
            return tuple(outside + stages[self.degrees.stage_of(rank)].nbytes for rank in ranks)
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
            for rank, cached in enumerate(self.work.cached_bytes_by_rank(self.degrees))
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
        if mode == "shard":
            first = bisect_left(self._residents, True, key=lambda resident: self.fits(self.shard(resident)))
            return self.shard(self._residents[first]) if first < len(self._residents) else None
        weights = WeightPlacement()
        if mode == "offload":
            full, counts = self.work.network.weight_bytes, []
            budgets = self.usable_bytes_by_rank(WeightPlacement(mode="offload"))
            # Against replicated weights: a rank that has all blocks needs no buffers.
            saved = [self.fetched_bytes(count) - self._block_buffers(count) for count in self._residents]
            for budget, active in zip(budgets, self.activation_bytes_by_rank, strict=True):
                excess = 0 if budget is None else full + active - budget
                first = bisect_left(saved, excess)
                if excess > 0 and first == len(self._residents):
                    return None
                counts.append(self._residents[first] if excess > 0 else self.blocks)
            by_rank = tuple(counts) if len(set(counts)) > 1 else ()
            weights = WeightPlacement(mode="offload", resident_blocks=min(counts), resident_blocks_by_rank=by_rank)
        return weights if self.fits(weights) else None

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
        cached = self.work.cached_bytes_per_block(degrees)
        loads = [Load(load.nbytes + cached * load.blocks, load.blocks) for load in network.loads]
        other = max(self.with_one_prompt_per_batch.activation_bytes_by_rank) + network.outside_bytes
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


def misfit(memory: MemoryModel) -> Refused:
    """Returns the refusal for one prompt at a time, with the numbers of the rank that lacks most."""
    least = min(memory.least_placements, key=lambda weights: max(memory.needed_bytes_by_rank(weights)))
    usable = [budget or 0 for budget in memory.usable_bytes_by_rank(least)]
    by_rank = zip(memory.needed_bytes_by_rank(least), usable, strict=True)
    needed, free = max(by_rank, key=lambda both: both[0] - both[1])
    host, limit, network = memory.capacity.host_bytes, memory.capacity.limited_by, memory.work.network
    computed = size_in_words(max(memory.activation_bytes_by_rank))
    kept = max(memory.work.cached_bytes_by_rank(memory.degrees))
    out = _nearest_fit(memory)
    values: dict[str, Any] = {
        "network": network.name,
        "weights": size_in_words(network.weight_bytes),
        "activations": say("memory.kept", activations=computed, kept=size_in_words(kept)) if kept else computed,
        "free": size_in_words(free, math.floor),
        "limit": say("memory.limited", limit=limit) if limit else "",
        "out": say("memory.raise", out=out, limit=limit) if limit else out,
    }
    unlimited = replace(memory, capacity=replace(memory.capacity, host_bytes=None)).most_resident("offload")
    if host is not None and unlimited is not None:
        fetched = size_in_words(memory.fetched_bytes(unlimited.resident_blocks), math.ceil)
        values |= {"fetched": fetched, "host": size_in_words(host, math.floor)}
        return Refused("memory.misfit.host", widget="weights", **values)
    main = "" if host is None else say("memory.host", size=size_in_words(host))
    return Refused("memory.misfit", widget="weights", **values, needed=size_in_words(needed, math.ceil), host=main)


def size_in_words(count: float, rounded: Callable[[float], int] = round) -> str:
    """Returns a size as text. Callers round a needed size up and a free one down, so that the two never look equal."""
    unit, name = (GIB, "GiB") if count >= GIB / 10 else (2**20, "MiB")
    return f"{rounded(10 * count / unit) / 10:.1f} {name}"


def _nearest_fit(memory: MemoryModel) -> Sentence:
    """Returns the sentence that names the nearest change with which the network fits."""
    work, network, degrees = memory.work, memory.work.network, memory.degrees
    if degrees.options.token_patches > 1 and _fits(replace(memory, degrees=degrees.with_options(token_patches=1))):
        return say("fits.exact")
    halved = replace(memory, work=replace(work, network=network.halved()))
    if network.weight_bytes > 1.5 * network.weights and _fits(halved):
        return say("fits.fp8")
    grows = "pipeline_degree" if degrees.pipeline_degree > 1 else "ring_degree"
    for factor in (2, 4, 8):
        more = replace(degrees, stages=(), shares=(), **{grows: getattr(degrees, grows) * factor})
        if _fits(replace(memory, degrees=more)):
            return say("fits.workers", workers=more.world_size)
    for part in (2, 4, 8, 16):
        if _fits(replace(memory, work=replace(work, tokens=max(1, work.tokens // part)))):
            return say("fits.pixels", part=part)
    return say("fits.none")


def _fits(memory: MemoryModel) -> bool:
    return any(memory.most_resident(mode) is not None for mode in ("replicate", *FETCHED_MODES))


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A device on which `ranks` together need `needed` bytes and could have `free`."""

    device: str
    ranks: tuple[int, ...]
    needed: int
    free: int
    limited_by: str = ""

    @property
    def each(self) -> int:
        """Returns the bytes that one rank could have."""
        return max(0, self.free) // len(self.ranks)

    @property
    def sentence(self) -> Sentence:
        needed, free = size_in_words(self.needed, math.ceil), size_in_words(max(0, self.free), math.floor)
        lack = say("memory.lack", needed=needed, device=self.device, free=free)
        return say("memory.lack.limited", lack=lack, limit=self.limited_by) if self.limited_by else lack

    def __str__(self) -> str:
        return self.sentence


def shortage(
    placement: Placement, readings: Sequence[Readings], fingerprint: str, needed: Sequence[int], *,
    limits: Sequence[int | None], limited_by: str,
) -> Shortage | None:  # fmt: skip
    """Returns the device that lacks most of the bytes `needed` by its ranks for the model with this `fingerprint`; None
    where all have enough. A rank's memory of this model counts as free, its memory of other models does not. `limits`
    are what each may take of its device, and the only limits of main memory."""
    sharing: dict[str, list[int]] = {}
    for rank, device in enumerate(placement.device_names[: len(readings)]):
        sharing.setdefault(device, []).append(rank)
    shortages = []
    for device, ranks in sharing.items():
        read = [readings[rank] for rank in ranks]
        limited = [limit for limit in (limits[rank] for rank in ranks) if limit is not None]
        known = [sum(limited)] if len(limited) == len(ranks) else []
        by = limited_by if known else ""
        if not device.startswith("cpu"):
            known.append(min(each.free_bytes for each in read) + sum(each.rank_bytes for each in read))
        if not known:
            continue
        free = min(known) - sum(each.other_models_bytes(fingerprint) for each in read)
        total = sum(needed[rank] for rank in ranks)
        if free < total:
            shortages.append(Shortage(device=device, ranks=tuple(ranks), needed=total, free=free, limited_by=by))
    return max(shortages, key=lambda one: one.needed - one.free, default=None)
