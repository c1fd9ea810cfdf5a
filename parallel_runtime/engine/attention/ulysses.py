"""Ulysses: from split tokens to split heads and back, one all-to-all each way, over chunks and counts of any size.

On the wire tokens come first, and what belongs to one token lies together, [tokens, batch, heads, head_dim]: what
arrives from all ranks is then one tensor, whatever each had, and needs no copy. Knows no attention.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from ..comm.collectives import Pending, all_to_all
from ..comm.mesh import ContextMesh, MeshDim, Parts
from ..split.streams import Streams, chunk_range, chunk_sizes

CAT_DIMS = 4  # of what CUDA concatenates by one kernel
MAX_HEAD_CHUNKS = 2  # at most: more would make kernels too small
# Of queries, keys and values that a rank sends in a layer. What travels behind the first wave's kernels costs their
# launches once more, some 60 us; 32 MiB travel for 100 us at NVLink's speed.
MIN_HIDDEN_BYTES = 32 << 20

TokensByRank = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of each context rank: of the queries, of the keys


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """Neighbouring ranks that own equally many `heads` each, from `first` on; `count` of each from `start` travel."""

    ranks: int
    first: int
    heads: int
    start: int
    count: int

    def of(self, tensor: Tensor, *, joined: bool) -> Tensor:
        """Returns these heads of [B, tokens, H, D] as [ranks, tokens, B, count, D], a view: without B where that is 1,
        and with count * D in the place of count and D where heads and D lie `joined` in memory."""
        batch, tokens, heads, dim = tensor.shape
        if heads != self.ranks * self.heads:
            tensor = tensor.narrow(2, self.first, self.ranks * self.heads)
        batch_dim, each = (batch,) if batch > 1 else (), dim if joined else 1
        tensor = tensor.view(*batch_dim, tokens, self.ranks, self.heads * each, *(() if joined else (dim,)))
        if self.count != self.heads:
            tensor = tensor.narrow(len(batch_dim) + 2, self.start * each, self.count * each)
        return tensor.permute(2, 1, 0, *range(3, tensor.ndim)) if batch_dim else tensor.transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class AllToAllLayout:
    """The layout of one all-to-all: tensors of the same tokens, split by tokens on one side and by heads on the other.

    `runs` are of every tensor; `tokens` are each rank's, `heads` this rank's of each tensor. Elements are counted
    for each peer: `by_heads` are what this rank's tokens have for it, `by_tokens` what its own have for this rank.
    `even`: all counts of all ranks are the same, on which every rank must agree.
    """

    runs: tuple[tuple[HeadRun, ...], ...]
    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    index: int
    batch: int
    dim: int
    by_heads: tuple[int, ...]
    by_tokens: tuple[int, ...]
    even: bool

    @property
    def counts(self) -> tuple[list[int] | None, list[int] | None]:
        """Returns `by_heads` and `by_tokens` as all_to_all_single takes them."""
        return (None, None) if self.even else (list(self.by_heads), list(self.by_tokens))

    def segments(self, flat: Tensor, *, joined: bool) -> list[tuple[tuple[HeadRun, ...], Tensor]]:
        """Returns each run of every tensor with its part [ranks, own tokens, B, heads, D] of what is split by tokens,
        in the dims of `HeadRun.of`."""
        own, start, parts = self.tokens[self.index], 0, []
        for runs in zip(*self.runs, strict=True):
            ranks, heads = runs[0].ranks, sum(run.count for run in runs)
            batch_dim = (self.batch,) if self.batch > 1 else ()
            shape = (ranks, own, *batch_dim, *((heads * self.dim,) if joined else (heads, self.dim)))
            size = ranks * own * self.batch * heads * self.dim
            if size:
                parts.append((runs, flat.narrow(0, start, size).view(shape)))
            start += size
        return parts


@lru_cache(maxsize=1024)
def all_to_all_layout(
    heads: tuple[int, ...],
    parts: Parts,
    tokens: tuple[int, ...],
    index: int,
    batch: int,
    dim: int,
    chunk: int,
    chunk_count: int,
) -> AllToAllLayout:
    """Returns the layout for tensors of `heads` each in part `chunk` of `chunk_count`. Ranks have the same multiple of
    each tensor's heads."""
    runs = tuple(_runs(count, parts, chunk, chunk_count) for count in heads)
    assert len({tuple(run.ranks for run in of_tensor) for of_tensor in runs}) == 1
    counts = [[run.count for run in of_tensor for _ in range(run.ranks)] for of_tensor in runs]
    by_rank = [sum(of_rank) for of_rank in zip(*counts, strict=True)]
    own = tuple(of_tensor[index] for of_tensor in counts)
    return AllToAllLayout(
        runs=runs,
        heads=own,
        tokens=tokens,
        index=index,
        batch=batch,
        dim=dim,
        by_heads=tuple(tokens[index] * batch * count * dim for count in by_rank),
        by_tokens=tuple(size * batch * sum(own) * dim for size in tokens),
        even=len(set(tokens)) == len(set(by_rank)) == 1,
    )


@dataclass(frozen=True, kw_only=True)
class HeadChunk:
    """Heads that are sent and attended to together; `first` is the first of this rank's query heads in it.

    `outbound` is one layout for queries, keys and values, or, where keys are other tokens, one for queries and one for
    keys and values; `inbound` is that of the output.
    """

    number: int
    first: int
    outbound: tuple[AllToAllLayout, ...]
    inbound: AllToAllLayout


def head_chunks(
    mesh: ContextMesh,
    query: Tensor,
    heads: tuple[int, int],
    tokens_by_rank: TokensByRank,
    same_tokens: bool,
    max_chunks: int = MAX_HEAD_CHUNKS,
    added: int = 0,
) -> tuple[HeadChunk, ...]:
    """Returns the head chunks, at most `max_chunks`, of queries [B, tokens, H, D] with `heads` heads, its own and the
    keys'; `same_tokens`: both are of the same tokens; D and `added` elements travel. Returns () without Ulysses
    ranks."""
    mesh_dim, first = mesh.ulysses, mesh.ring.index * mesh.ulysses.size
    if mesh_dim.size == 1:
        return ()
    of_queries, of_keys = heads[:1], (heads[1], heads[1])
    queries, keys = (tokens[first : first + mesh_dim.size] for tokens in tokens_by_rank)
    outbound = [((*of_queries, *of_keys), queries)] if same_tokens else [(of_queries, queries), (of_keys, keys)]
    number = min(max_chunks, _chunk_count(query, heads, tokens_by_rank, mesh_dim.parts))
    start, own = chunk_range(heads[0], mesh_dim.parts, mesh_dim.index)

    def packed(heads: tuple[int, ...], tokens: tuple[int, ...], chunk: int) -> AllToAllLayout:
        return all_to_all_layout(
            heads, mesh_dim.parts, tokens, mesh_dim.index, query.shape[0], query.shape[3] + added, chunk, number
        )

    return tuple(
        HeadChunk(
            number=chunk,
            first=start + chunk_range(own, number, chunk)[0],
            outbound=tuple(packed(*each, chunk) for each in outbound),
            inbound=packed(of_queries, queries, chunk),
        )
        for chunk in range(number)
    )


def _chunk_count(query: Tensor, heads: tuple[int, int], tokens_by_rank: TokensByRank, parts: Parts) -> int:
    """Returns the number of head chunks, from global counts alone: ranks that disagree would wait forever."""
    (of_queries, of_keys), (queries, keys) = heads, map(max, tokens_by_rank)
    if of_keys < of_queries and any(own % MAX_HEAD_CHUNKS for own in chunk_sizes(of_keys, parts)):
        return 1
    sent = query.shape[0] * query.shape[3] * query.element_size() * (of_queries * queries + 2 * of_keys * keys)
    return MAX_HEAD_CHUNKS if sent >= MIN_HIDDEN_BYTES else 1


def to_heads(
    tensors: Sequence[Tensor], layout: AllToAllLayout, mesh_dim: MeshDim, streams: Streams, use: Hashable
) -> Pending:
    """Sends the heads of each tensor [B, own tokens, H, D]; `split_received` takes what arrives. The next layer's
    transfer for the same `use` gets the same memory of `streams`."""
    send = streams.scratch(("send", use), (sum(layout.by_heads),), tensors[0])
    joined = all(map(_joined, tensors))
    for runs, segment in layout.segments(send, joined=joined):
        parts = [run.of(tensor, joined=joined) for run, tensor in zip(runs, tensors, strict=True)]
        _pack(parts, segment, dim=-1 if joined else -2)
    received = streams.scratch(("receive", use), (sum(layout.by_tokens),), tensors[0])
    return all_to_all(send, received, *layout.counts, mesh_dim)


def split_received(received: Tensor, layout: AllToAllLayout) -> tuple[Tensor, ...]:
    """Splits what arrived into views [B, all tokens, own heads, D] of each tensor."""
    full = received.view(sum(layout.tokens), layout.batch, sum(layout.heads), layout.dim)
    return full.transpose(0, 1).split(layout.heads, 2)


def to_tokens(full: Tensor, layout: AllToAllLayout, mesh_dim: MeshDim, streams: Streams, use: Hashable) -> Pending:
    """Sends [B, all tokens, local heads, D] of each rank back; `write_returned` takes what arrives."""
    send = full.transpose(0, 1).reshape(-1)
    received = streams.scratch(("return", use), (sum(layout.by_heads),), full)
    by_heads, by_tokens = layout.counts
    return all_to_all(send, received, by_tokens, by_heads, mesh_dim)


def write_returned(returned: Tensor, layout: AllToAllLayout, out: Tensor) -> None:
    """Writes the heads that came back to this rank into `out` [B, own tokens, H, D]."""
    joined = _joined(out)
    for (run,), segment in layout.segments(returned, joined=joined):
        run.of(out, joined=joined).copy_(segment)


def _pack(parts: Sequence[Tensor], out: Tensor, dim: int) -> None:
    """Concatenates along `dim`, which is none of the first three. CUDA's `cat` is one kernel for tensors of at most 4
    dims, and a copy for each tensor above (ATen/native/cuda/Shape.cu)."""
    if out.ndim <= CAT_DIMS:
        torch.cat(list(parts), dim=dim, out=out)
        return
    for entry in range(out.shape[2]):
        torch.cat([part.select(2, entry) for part in parts], dim=dim, out=out.select(2, entry))


def _joined(tensor: Tensor) -> bool:
    """Do heads and D of [B, tokens, H, D] lie in memory as one dim?"""
    return tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]


def _runs(heads: int, parts: Parts, chunk: int, chunk_count: int) -> tuple[HeadRun, ...]:
    runs, first = [], 0
    for own, group in groupby(chunk_sizes(heads, parts)):
        start, count = chunk_range(own, chunk_count, chunk)
        runs.append(HeadRun(ranks=len(list(group)), first=first, heads=own, start=start, count=count))
        first += runs[-1].ranks * own
    return tuple(runs)
