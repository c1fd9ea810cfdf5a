"""Trading tokens for heads and back: one all-to-all each way, over chunks and head counts of any size.

On the wire tokens come first, [tokens, batch, heads, head_dim]: what arrives from all ranks is then one tensor, and
needs no copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Pending, allocate, exchange
from .mesh import Axis
from .sizes import chunk_sizes


class HeadsPending:
    """Heads under way. `wait` gives them as [tokens of all ranks, B, this rank's heads, D]."""

    def __init__(self, pending: Pending, shape: tuple[int, ...]) -> None:
        self._pending = pending
        self._shape = shape

    def wait(self) -> Tensor:
        (received,) = self._pending.wait()
        return received.view(self._shape)


def start_to_heads(chunk: Tensor, tokens: Sequence[int], axis: Axis) -> HeadsPending:
    """[B, own tokens, H, D] of each rank starts to become [all tokens, B, own heads, D]; rank i holds `tokens[i]`."""
    batch, own_tokens, heads, dim = chunk.shape
    head_counts = chunk_sizes(heads, axis.size)
    own_heads = head_counts[axis.index]
    counts_out = [own_tokens * batch * count * dim for count in head_counts]
    counts_in = [size * batch * own_heads * dim for size in tokens]
    pending = exchange(_by_heads(chunk, head_counts), counts_out, counts_in, axis)
    return HeadsPending(pending, (sum(tokens), batch, own_heads, dim))


def to_tokens(whole: Tensor, heads: int, tokens: Sequence[int], axis: Axis) -> Tensor:
    """The way back: [all tokens, B, own heads, D] of each rank becomes [B, own tokens, `heads`, D]."""
    _, batch, own_heads, dim = whole.shape
    own_tokens = tokens[axis.index]
    head_counts = chunk_sizes(heads, axis.size)
    counts_out = [size * batch * own_heads * dim for size in tokens]
    counts_in = [own_tokens * batch * count * dim for count in head_counts]
    (received,) = exchange(whole.reshape(-1), counts_out, counts_in, axis).wait()
    if own_heads * axis.size == heads:
        by_rank = received.view(axis.size, own_tokens, batch, own_heads, dim)
        return by_rank.permute(2, 1, 0, 3, 4).reshape(batch, own_tokens, heads, dim)
    parts = received.split(counts_in)
    shaped = [part.view(own_tokens, batch, count, dim) for part, count in zip(parts, head_counts, strict=True)]
    return torch.cat(shaped, dim=2).transpose(0, 1).contiguous()


def _by_heads(chunk: Tensor, head_counts: Sequence[int]) -> Tensor:
    """Flat send buffer: for each rank, tokens first, the heads that are its own. One pass over `chunk`."""
    tokens_first = chunk.transpose(0, 1)
    if head_counts[0] == head_counts[-1]:
        return tokens_first.unflatten(2, (len(head_counts), head_counts[0])).permute(2, 0, 1, 3, 4).reshape(-1)
    send = allocate((chunk.numel(),), chunk)
    parts = tokens_first.split(list(head_counts), dim=2)
    for part, place in zip(parts, send.split([part.numel() for part in parts]), strict=True):
        place.view(part.shape).copy_(part)
    return send
