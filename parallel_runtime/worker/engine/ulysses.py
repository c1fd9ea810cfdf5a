"""Trading tokens for heads and back: one all-to-all each way for a wave of heads, over chunks and counts of any size.

On the wire tokens come first, [tokens, batch, heads, head_dim]: what arrives from all ranks is then one tensor, and
needs no copy. Knows no attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .exchange import Pending, allocate, exchange
from .mesh import Axis
from .sizes import chunk_range

Wave = tuple[tuple[int, int], ...]  # (start, count) of the heads that each rank has in it


def waves(heads: int, ranks: int, count: int) -> list[Wave]:
    """The heads of each rank in `count` parts: what lies in one wave travels, and is attended to, together."""
    own = [chunk_range(heads, ranks, rank) for rank in range(ranks)]
    parts = [[chunk_range(size, count, wave) for _, size in own] for wave in range(count)]
    return [tuple((own[rank][0] + start, size) for rank, (start, size) in enumerate(part)) for part in parts]


def to_heads(chunk: Tensor, wave: Wave, tokens: Sequence[int], axis: Axis) -> Pending:
    """[B, own tokens, H, D] of each rank starts to become [all tokens, B, own heads of the wave, D].

    Rank i holds `tokens[i]`.
    """
    tokens_first = chunk.transpose(0, 1)
    parts = [tokens_first.narrow(2, *heads) for heads in wave]
    if axis.size == 1:
        return Pending([], parts, chunk.device)
    _, batch, own_heads, dim = parts[axis.index].shape
    shape = (sum(tokens), batch, own_heads, dim)
    counts_out = [part.numel() for part in parts]
    send = allocate((sum(counts_out),), chunk)
    for part, place in zip(parts, send.split(counts_out), strict=True):
        place.view(part.shape).copy_(part)
    return exchange(send, counts_out, [size * batch * own_heads * dim for size in tokens], axis, shape)


def to_tokens(whole: Tensor, wave: Wave, tokens: Sequence[int], axis: Axis) -> Pending:
    """The way back starts: [all tokens, B, own heads of the wave, D] of each rank. `place` takes what arrives."""
    if axis.size == 1:
        return Pending([], [whole], whole.device)
    _, batch, own_heads, dim = whole.shape
    counts_out = [size * batch * own_heads * dim for size in tokens]
    counts_in = [tokens[axis.index] * batch * size * dim for _, size in wave]
    return exchange(whole.reshape(-1), counts_out, counts_in, axis, (sum(counts_in),))


def place(returned: Tensor, wave: Wave, out: Tensor) -> None:
    """Write the heads of a wave that came back to this rank into `out` [B, own tokens, H, D]."""
    batch, own_tokens, _, dim = out.shape
    parts = returned.reshape(-1).split([own_tokens * batch * size * dim for _, size in wave])
    for part, (start, size) in zip(parts, wave, strict=True):
        out.narrow(2, start, size).copy_(part.view(own_tokens, batch, size, dim).transpose(0, 1))
