"""What a way of cutting costs: bytes, seconds, memory, from the sizes of model and sequence. Arithmetic only.

The model is that of DESIGN: Ulysses waits for its all-to-alls, a ring hides a transfer behind the attention of the
block it has, if the block is long enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..specs import Parallelism

# One pass over a block costs more in several pieces than in one: launches, and the merge of the partial results.
RING_OVERHEAD = 0.06
# Live activations of a transformer block, in tensors of [local tokens, width]: residuals, q, k, v, MLP; and what is
# packed and passed on in an attention over ring and Ulysses, up to 10 where buffers are too large to be kept.
ACTIVATIONS = 20
# What a step cache keeps from step to step, in the same: of two prompts the change by the first block, and by the rest.
KEPT = 6


@dataclass(frozen=True, kw_only=True)
class Link:
    """What the workers measured when they met: bytes/s between two of them, FLOP/s of one, bytes/s from main memory to
    a device while all copy."""

    bytes_per_second: float
    flops_per_second: float
    host_bytes_per_second: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A network in numbers. `divisible`: a plan says how its sequence is cut; `skippable`: a step cache may leave its
    blocks out. `width` = heads x head size. `weights`
    are counted, `weight_bytes` those of the file's format, `item_bytes` of one number in what it computes. `blocks`:
    the bytes of each block that a plan knows."""

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

    def work(self, rows: int, tokens: int, *, prompts: int = 1, cached: bool = False) -> Work:
        """One evaluation of `rows` sequences of `tokens`, of each of so many `prompts`."""
        return Work(figures=self, rows=rows, tokens=tokens, prompts=1 if cached else prompts, cached=cached)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One evaluation: `tokens` of all streams together; `cached`: with a step cache. Workers evaluate `prompts` in one
    batch, unless they are in lanes of their own."""

    figures: Figures
    tokens: int
    rows: int = 1
    prompts: int = 1
    cached: bool = False

    @property
    def activation_bytes(self) -> int:
        """One activation tensor of the whole sequence."""
        return self.rows * self.tokens * self.figures.width * self.figures.item_bytes


def coarse(speed: float) -> float:
    """The nearest power of two: a measurement's noise must not change how the next run is cut."""
    return 2.0 ** round(math.log2(speed)) if speed > 0 else 0.0


def bytes_per_layer(work: Work, parallelism: Parallelism) -> float:
    """What one rank sends in one attention: 4T(u-1)/u of its share for Ulysses, 2T/u a hop for the ring."""
    ring, ulysses = parallelism.ring_degree, parallelism.ulysses_degree
    share = work.activation_bytes / (ring * ulysses)
    return 4 * share * (ulysses - 1) / ulysses + 2 * share * (ring - 1)


def attention_seconds(work: Work, parallelism: Parallelism, link: Link) -> float:
    """One attention layer on one rank, its transfers included."""
    ring, ulysses = parallelism.ring_degree, parallelism.ulysses_degree
    share = work.activation_bytes / (ring * ulysses)
    compute = 4 * work.rows * work.tokens**2 * work.figures.width / (ring * ulysses) / link.flops_per_second
    if parallelism.context_parallel_size == 1 or not link.bytes_per_second:  # a worker alone has measured none
        return compute
    swap = 4 * share * (ulysses - 1) / ulysses / link.bytes_per_second
    exposed = max(0.0, 2 * share / link.bytes_per_second - compute / ring)
    return compute * (1 + RING_OVERHEAD * (ring > 1)) + swap + (ring - 1) * exposed


def evaluation_seconds(work: Work, parallelism: Parallelism, link: Link) -> float:
    """One evaluation on one rank: the linear layers, 2 FLOP a weight and token, and every attention."""
    linear = (
        2 * work.figures.weights * work.rows * work.tokens / parallelism.context_parallel_size / link.flops_per_second
    )
    return linear + work.figures.layers * attention_seconds(work, parallelism, link)


def memory_bytes(work: Work, parallelism: Parallelism) -> int:
    """About what one rank holds at its peak: all weights, and the activations of its tokens."""
    return work.figures.weight_bytes + activation_bytes(work, parallelism)


def activation_bytes(work: Work, parallelism: Parallelism) -> int:
    """About what one evaluation adds to the weights on one rank."""
    rows = -(-work.rows // parallelism.data_degree)
    batch = rows * -(-work.prompts // parallelism.cfg_degree)
    tensors = (ACTIVATIONS + KEPT * work.cached) * batch
    return tensors * work.activation_bytes // work.rows // parallelism.context_parallel_size
