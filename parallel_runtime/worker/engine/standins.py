"""Ranks without a token of a stream hold one stand-in, which no attention sees and no gather shows.

Layers of diffusers reshape with -1 and fail on tensors of no elements, so a chunk of more than nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sizes import chunk_range


def hold(whole: Tensor, dim: int, parts: int, index: int) -> Tensor:
    """Chunk `index` of `whole` along `dim`, or a stand-in (its first token) where that chunk is empty. A view."""
    start, size = chunk_range(whole.shape[dim], parts, index)
    return whole.narrow(dim, start, size) if size else whole.narrow(dim, 0, min(whole.shape[dim], 1))


def held_sizes(own: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Tokens that a rank holds of streams of global `lengths`, of which `own` are its own."""
    return [max(size, min(length, 1)) for size, length in zip(own, lengths, strict=True)]


def drop(held: Tensor, own: Sequence[int], sizes: Sequence[int], dim: int = 1) -> Tensor:
    """Without stand-ins: `held` has `sizes` tokens of each stream along `dim`, the result `own`."""
    parts = held.split(list(sizes), dim)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, own, strict=True)], dim)


def restore(out: Tensor, own: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """[B, sum(own), ...] with zeros where the stand-ins were, [B, sum(sizes), ...]."""
    whole = out.new_zeros((out.shape[0], sum(sizes), *out.shape[2:]))
    for place, part, size in zip(whole.split(list(sizes), 1), out.split(list(own), 1), own, strict=True):
        place.narrow(1, 0, size).copy_(part)
    return whole
