"""What a way of cutting costs: bytes, seconds, memory, from the sizes of model and sequence. Arithmetic only.

The model is that of DESIGN: Ulysses waits for its all-to-alls, a ring hides a transfer behind the attention of the
block it has, if the block is long enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..families.base import Family
from ..families.header import header
from ..specs import DtypeName, ModelSpec, Parallelism

# One pass over a block costs more in several pieces than in one: launches, and the merge of the partial results.
RING_OVERHEAD = 0.06
# Live activations of a transformer block, in tensors of [local tokens, width]: q, k, v, output, MLP, residuals.
ACTIVATIONS = 18
# What a step cache keeps from step to step, in the same: of two prompts the change by the first block, and by the rest.
KEPT = 6
ITEM_BYTES: dict[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Link:
    """What the workers measured when they met: bytes/s between two of them, FLOP/s of one, free bytes on each."""

    bytes_per_second: float
    flops_per_second: float
    free_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Work:
    """One evaluation: `tokens` of all streams together, `width` = heads x head size, bytes of one number; `cached`:
    with a step cache."""

    tokens: int
    width: int
    heads: int
    layers: int
    weight_bytes: int
    item_bytes: int = 2
    rows: int = 1
    cached: bool = False

    @property
    def activation_bytes(self) -> int:
        """One activation tensor of the whole sequence."""
        return self.rows * self.tokens * self.width * self.item_bytes


def work_of(
    spec: ModelSpec, family: Family, latent_shape: tuple[int, ...], text_tokens: int, *, cached: bool = False
) -> Work:
    """One evaluation of a model on a latent [B, C, (T,) H, W] with a prompt of `text_tokens`."""
    item_bytes = ITEM_BYTES[spec.compute_dtype]
    weights = sum(math.prod(shape) for shape in header(spec.path).shapes.values())
    return Work(
        tokens=sum(family.tokens(latent_shape, text_tokens).values()),
        width=family.width,
        heads=family.heads,
        layers=family.layers,
        weight_bytes=weights * item_bytes,
        item_bytes=item_bytes,
        rows=latent_shape[0],
        cached=cached,
    )


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
    compute = 4 * work.rows * work.tokens**2 * work.width / (ring * ulysses) / link.flops_per_second
    swap = 4 * share * (ulysses - 1) / ulysses / link.bytes_per_second
    exposed = max(0.0, 2 * share / link.bytes_per_second - compute / ring)
    return compute * (1 + RING_OVERHEAD * (ring > 1)) + swap + (ring - 1) * exposed


def evaluation_seconds(work: Work, parallelism: Parallelism, link: Link) -> float:
    """One evaluation on one rank: the linear layers, 2 FLOP a weight and token, and every attention."""
    weights = work.weight_bytes / work.item_bytes
    linear = 2 * weights * work.rows * work.tokens / parallelism.context_parallel_size / link.flops_per_second
    return linear + work.layers * attention_seconds(work, parallelism, link)


def memory_bytes(work: Work, parallelism: Parallelism) -> int:
    """About what one rank holds at its peak: all weights, and the activations of its tokens."""
    return work.weight_bytes + activation_bytes(work, parallelism)


def activation_bytes(work: Work, parallelism: Parallelism) -> int:
    """About what one evaluation adds to the weights on one rank."""
    return (ACTIVATIONS + KEPT * work.cached) * work.activation_bytes // parallelism.context_parallel_size
