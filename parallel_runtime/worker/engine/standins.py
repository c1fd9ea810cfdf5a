"""Ranks without a token of a stream hold one stand-in, which no attention sees and no gather shows.

Layers of diffusers reshape with -1 and fail on tensors of no elements, so a chunk of more than nothing is kept.
"""

from __future__ import annotations

from torch import Tensor

from .sizes import chunk_range


def hold(whole: Tensor, dim: int, parts: int, index: int) -> Tensor:
    """Chunk `index` of `whole` along `dim`, or a stand-in (its first token) where that chunk is empty. A view."""
    start, size = chunk_range(whole.shape[dim], parts, index)
    return whole.narrow(dim, start, size) if size else whole.narrow(dim, 0, min(whole.shape[dim], 1))
