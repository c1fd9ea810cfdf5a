"""What a way of cutting costs: bytes, seconds, memory, from the sizes of model and sequence. Arithmetic only.

Ulysses waits for its all-to-alls; a ring hides a transfer behind the attention of the block it has, if the block is
long enough. Both cost packing, a ring also merging; and an evaluation lasts as long as its launches, at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..loads import Load
from ..specs import Parallelism, Placement, RotateMethod
from .shares import in_proportion

# Calibrated by a rank's share of FLUX.1 dev at 1024 px and of Wan 2.1 14B at 480p on one H100 (2026-11-22), of whose
# matrix product the workers say 2 ** 49 FLOP/s. Shares of that speed that the linear layers reach, with all that is
# between them, and attention:
LINEAR, ATTENTION = 0.91, 0.62
PASSED = 12  # widths squared: the weights of a layer that a token passes. Modulation is of whole pictures.
# FLOP for each byte that goes through memory; no slower than main memory.
FLOP_PER_BYTE = 245
LEAST_BYTES_PER_SECOND = 1e10
# Passes over a tensor of a rank's tokens: packing for Ulysses and back, for a ring, merging one block.
PACKED, PACKED_FOR_RING, MERGED = 10, 4, 5
# Seconds of the device a layer: kernels that are too small for it once the work is divided, and those of each block.
DIVIDED, BLOCK = 215e-6, 27.5e-6
# Seconds of the host a layer where launches are not recorded: its own, for each rank, for each block of a ring; and
# what the one of host and device who is done sooner adds to the other.
LAUNCHED, LAUNCHED_BY_RANKS, LAUNCHED_BY_BLOCKS, LAG = 1.09e-3, 150e-6, 190e-6, 0.1
# Of what is free beside weights and activations, what a ring may collect keys and values in.
COLLECTS = 1 / 8
# Bytes/s from which all may send to all at once: through one bus or one network card they would wait for each other.
FAST = 3e10
# Live activations of a transformer block, in tensors of [local tokens, width]: residuals, q, k, v, MLP; and what is
# packed and passed on in an attention over ring and Ulysses, up to 10 where buffers are too large to be kept.
ACTIVATIONS = 20
# Times the mean, in which the slowest worker would do it all: what is less is the noise of a measurement.
APART = 1.1
# What a step cache keeps from step to step, in the same: of two prompts the change by the first block, and by the rest.
KEPT = 6


@dataclass(frozen=True, kw_only=True)
class Speed:
    """FLOP/s of one worker, of matrix products and in attention; 0 for not measured."""

    products: float
    attention: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """What the workers measured when they met: bytes/s between two of them, FLOP/s of one, bytes/s from main memory to
    a device while all copy; and the speed of each of the `ranks`, as it was measured."""

    bytes_per_second: float
    flops_per_second: float
    host_bytes_per_second: float = 0.0
    ranks: tuple[Speed, ...] = ()

    def of(self, ranks: Sequence[int]) -> Link:
        """What these of the ranks measured."""
        if not self.ranks:
            return self
        speeds = tuple(self.ranks[rank] for rank in ranks)
        return replace(self, ranks=speeds, flops_per_second=coarse(min(speed.products for speed in speeds)))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A network in numbers. `divisible`: a plan says how its sequence is cut; `skippable`: a step cache may leave its
    blocks out. `width` = heads x head size. `weights`
    are counted, `weight_bytes` those of the file's format, `item_bytes` of one number in what it computes. `blocks`:
    the bytes of each block that a plan knows, `loads` what may be a stage's of a pipeline, in turn; `unpatched` says
    why its tokens cannot go through one patch by patch."""

    name: str
    divisible: bool = True
    skippable: bool = True
    heads: int
    layers: int
    width: int
    weights: int
    weight_bytes: int
    item_bytes: int
    blocks: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()
    unpatched: str = ""

    def whole(self, name: str) -> Figures:
        """The same network where nothing of it is cut or skipped."""
        return replace(
            self, name=name, divisible=False, skippable=False, heads=1, layers=0, width=0, blocks=(), loads=()
        )

    def work(self, rows: int, tokens: int, *, prompts: int = 1, cached: bool = False, recorded: bool = False) -> Work:
        """One evaluation of `rows` sequences of `tokens`, of each of so many `prompts`."""
        at_once = 1 if cached else prompts
        return Work(
            figures=self, rows=rows, tokens=tokens, prompts=at_once, branches=prompts, cached=cached, recorded=recorded
        )

    @property
    def passed(self) -> int:
        """Weights that every token is multiplied by."""
        return min(self.weights, PASSED * self.layers * self.width**2) if self.layers else self.weights


@dataclass(frozen=True, kw_only=True)
class Work:
    """One evaluation: `tokens` of all streams together; `cached`: with a step cache; `recorded`: its launches are
    replayed. Workers evaluate `prompts` in one batch, of the `branches` of a step, unless they are in lanes of their
    own."""

    figures: Figures
    tokens: int
    rows: int = 1
    prompts: int = 1
    branches: int = 1
    cached: bool = False
    recorded: bool = False

    @property
    def activation_bytes(self) -> int:
        """One activation tensor of the whole sequence."""
        return self.rows * self.tokens * self.figures.width * self.figures.item_bytes


def of_a_lane(work: Work, parallelism: Parallelism) -> int:
    """Rows of all prompts together that the busiest lane evaluates in a step; through stages they follow each other."""
    return max(_rows(work, parallelism, group) for group in range(parallelism.data_degree))


def _rows(work: Work, parallelism: Parallelism, group: int) -> int:
    """The same of a lane among so many of data_degree."""
    shares = parallelism.rows
    return -(-work.rows * shares[group] // sum(shares)) * -(-work.prompts // parallelism.cfg_degree)


def coarse(speed: float) -> float:
    """The nearest power of two: a measurement's noise must not change how the next run is cut."""
    return 2.0 ** round(math.log2(speed)) if speed > 0 else 0.0


def bytes_per_layer(work: Work, parallelism: Parallelism) -> float:
    """What one rank sends in one attention: 4T(u-1)/u of its share for Ulysses, 2T/u a hop for the ring."""
    ring, ulysses = parallelism.ring_degree, parallelism.ulysses_degree
    share = work.activation_bytes / (ring * ulysses)
    return 4 * share * (ulysses - 1) / ulysses + 2 * share * (ring - 1)


def evaluation_seconds(work: Work, parallelism: Parallelism, link: Link, *, device_bytes: int | None = None) -> float:
    """One evaluation on one rank, its transfers included: as long as the device takes, or as the host to launch it.
    `device_bytes`: see `rotating`."""
    parallelism = replace(parallelism, rotate_method=rotating(work, parallelism, link, device_bytes))
    figures, ranks = work.figures, parallelism.context_parallel_size
    linear = 2 * figures.passed * work.rows * work.tokens / ranks / (LINEAR * link.flops_per_second)
    device = linear + figures.layers * attention_seconds(work, parallelism, link)
    staged = parallelism.pipeline_degree > 1
    host = 0.0 if work.recorded and not staged else figures.layers * _launching(parallelism)
    return (max(device, host) + LAG * min(device, host)) * (_in_stages(work, parallelism) if staged else 1.0)


def _in_stages(work: Work, parallelism: Parallelism) -> float:
    """The time of an evaluation, as a share of what one stage that had all blocks would take: while the pipeline fills
    and empties, stages stand still."""
    flights, stages = of_a_lane(work, parallelism) * parallelism.patches, parallelism.pipeline_degree
    return (flights + stages - 1) / (flights * stages)


def alone_seconds(work: Work, speed: Speed) -> float:
    """What this worker would compute for, had it all of the work; 0 where its speed is not known."""
    if not (speed.products and speed.attention):
        return 0.0
    linear = 2 * work.figures.passed * work.rows * work.tokens
    attention = 4 * work.rows * work.tokens**2 * work.figures.width * work.figures.layers
    return linear / (LINEAR * speed.products) + attention / speed.attention


def each_alone(work: Work, link: Link) -> list[float]:
    """The same of each rank."""
    return [alone_seconds(work, speed) for speed in link.ranks]


def are_known(work: Work, placement: Placement, link: Link) -> bool:
    """Did each worker measure how fast it is by itself? Those that share a device take its time from each other."""
    return not placement.shared and len(link.ranks) == placement.world_size and all(each_alone(work, link))


def are_unlike(work: Work, placement: Placement, link: Link) -> bool:
    """Did these workers measure that?"""
    alone = each_alone(work, link)
    return are_known(work, placement, link) and max(alone) > APART * sum(alone) / len(alone)


def by_speed(work: Work, link: Link) -> tuple[int, ...]:
    """Shares in proportion to what each of these workers measured."""
    return in_proportion([1 / alone for alone in each_alone(work, link)])


def together(work: Work, degrees: Parallelism, link: Link) -> Link:
    """The same with the speed of one of so many like workers. Ranks of a sequence have shares by their speed, and the
    slowest lane is waited for."""
    each, alone = degrees.context_parallel_size, each_alone(work, link)
    lanes = [alone[first : first + each] for first in range(0, len(alone), each)]
    slowest = max(each / sum(1 / one for one in lane) for lane in lanes)
    return replace(link, flops_per_second=alone_seconds(work, Speed(products=1.0, attention=ATTENTION)) / slowest)


def times_as_fast(work: Work, parallelism: Parallelism, link: Link) -> float:
    """A step on these workers, beside one on a worker alone: prompts and rows are shared out, and tokens."""
    share = replace(work, rows=-(-work.rows // parallelism.data_degree))
    several = -(-work.prompts // parallelism.cfg_degree) * evaluation_seconds(share, parallelism, link)
    return work.prompts * evaluation_seconds(work, Parallelism(), link) / several


def attention_seconds(work: Work, parallelism: Parallelism, link: Link) -> float:
    """One attention layer on one rank, its transfers included."""
    ring, ulysses = parallelism.ring_degree, parallelism.ulysses_degree
    share = work.activation_bytes / (ring * ulysses)
    compute = 4 * work.rows * work.tokens**2 * work.figures.width / (ring * ulysses)
    compute /= ATTENTION * link.flops_per_second
    if parallelism.context_parallel_size == 1 or not link.bytes_per_second:  # a worker alone has measured none
        return compute
    passes = PACKED * (ulysses > 1) + (PACKED_FOR_RING + MERGED * _blocks(parallelism)) * (ring > 1)
    touched = passes * share / max(link.flops_per_second / FLOP_PER_BYTE, LEAST_BYTES_PER_SECOND)
    small = DIVIDED + BLOCK * _blocks(parallelism) * (ring > 1)
    return compute + touched + small + _waiting(share, compute, parallelism, link)


def _waiting(share: float, compute: float, parallelism: Parallelism, link: Link) -> float:
    """Seconds for transfers that nothing is computed behind."""
    ring, ulysses = parallelism.ring_degree, parallelism.ulysses_degree
    swap = 4 * share * (ulysses - 1) / ulysses / link.bytes_per_second
    hop, block = 2 * share / link.bytes_per_second, compute / ring
    if parallelism.rotate_method == "allgather":
        return swap + max(0.0, (ring - 1) * hop - block)
    return swap + (ring - 1) * max(0.0, hop - block)


def _blocks(parallelism: Parallelism) -> int:
    """That a rank attends to one by one."""
    return min(2, parallelism.ring_degree) if parallelism.rotate_method == "allgather" else parallelism.ring_degree


def _launching(parallelism: Parallelism) -> float:
    """Seconds of the host a layer."""
    ranks, ring = parallelism.context_parallel_size, parallelism.ring_degree
    divided = LAUNCHED_BY_RANKS * ranks + LAUNCHED_BY_BLOCKS * _blocks(parallelism) * (ring > 1)
    return LAUNCHED + divided * (ranks > 1)


def rotating(work: Work, parallelism: Parallelism, link: Link, device_bytes: int | None) -> RotateMethod:
    """How a ring's keys and values go round where it is asked to find out: all at once where there is room for them,
    the link is fast, and less hiding costs less than fewer blocks gain. A worker may take `device_bytes` of its device,
    None: nobody knows."""
    if parallelism.rotate_method != "auto":
        return parallelism.rotate_method
    if parallelism.ring_degree == 1 or link.bytes_per_second < FAST or device_bytes is None:
        return "alltoall"
    ways: dict[RotateMethod, float] = {
        way: attention_seconds(work, replace(parallelism, rotate_method=way), link) for way in ("alltoall", "allgather")
    }
    free = device_bytes - memory_bytes(work, parallelism)
    roomy = collected_bytes(work, parallelism) <= COLLECTS * free
    return "allgather" if roomy and ways["allgather"] <= ways["alltoall"] else "alltoall"


def collected_bytes(work: Work, parallelism: Parallelism) -> int:
    """Keys and values of a whole ring, as one rank has them when they are collected."""
    return 2 * of_a_lane(work, parallelism) * work.activation_bytes // work.rows // parallelism.ulysses_degree


def memory_bytes(work: Work, parallelism: Parallelism) -> int:
    """About what one rank holds at its peak: all weights, and the activations of its tokens."""
    return work.figures.weight_bytes + activation_bytes(work, parallelism)


def activation_bytes(work: Work, parallelism: Parallelism) -> int:
    """About what one evaluation adds to the weights on the rank that has most of it."""
    return max(activation_bytes_of_each(work, parallelism))


def activation_bytes_of_each(work: Work, parallelism: Parallelism) -> tuple[int, ...]:
    """About what one evaluation adds to the weights on each rank, by its own share."""
    tensor = (ACTIVATIONS + KEPT * work.cached) * (work.activation_bytes // work.rows)
    found: list[int] = []
    for number, lane in enumerate(parallelism.lanes):
        rows = _rows(work, parallelism, number // parallelism.cfg_degree % parallelism.data_degree)
        found += [tensor * rows * share // sum(lane) for share in lane]
    return tuple(found)
