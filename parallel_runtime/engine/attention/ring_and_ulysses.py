"""How queries, keys and values travel between ranks: around a ring, or from split tokens to split heads (Ulysses).

In a ring a rank attends to the key and value blocks of all, rotated point to point or collected at once, and the
outputs of blocks are merged by log-sum-exp: any order of blocks gives the attention over all of them. A block that
rotates is one message, [2, batch, tokens, heads, head_dim]: its keys, then its values. Blocks that are collected come
tokens first, [tokens, batch, 2 * heads, head_dim], and are one block then. No sizes are exchanged. Keys and values have
one shape and dtype. Both are packed by `cat` in 4 dims, which is one kernel on CUDA; `stack`, in 5, would be two.

Ulysses is one all-to-all each way, over chunks and counts of any size. On the wire tokens come first, and what belongs
to one token lies together, [tokens, batch, heads, head_dim]: what arrives from all ranks is then one tensor, whatever
each had, and needs no copy."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from ...request import EngineOptions
from ..comm import collectives
from ..comm.collectives import Pending
from ..comm.mesh import ContextMesh, MeshDim, Parts
from ..split.streams import SCRATCH_CACHE_BYTES, Streams, chunk_range, chunk_sizes

MAX_PENDING_BLOCKS = 8  # blocks that are merged at once; more would take more memory


class Merge:
    """Attention over the blocks added so far. Blocks wait until there are several, to be read once each."""

    def __init__(self, *, in_float32: bool) -> None:
        self._in_float32 = in_float32
        self._outs: list[Tensor] = []
        self._lses: list[Tensor] = []

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Adds a block's finite output [B, Sq, H, D] and log-sum-exp [B, Sq, H, 1]. May write into both."""
        if len(self._outs) == MAX_PENDING_BLOCKS:
            weights, lse_of_all = self._weights(), torch.logsumexp(torch.stack(self._lses), 0)
            self._outs, self._lses = [self._sum(self._outs, weights)], [lse_of_all]
        self._outs.append(out)
        self._lses.append(lse)

    def result(self, query: Tensor, fully_masked: Tensor | None) -> Tensor:
        """Returns [B, Sq, H, D] in the query's dtype: zero where nothing was added, or where `fully_masked` is set."""
        if not self._outs:
            return collectives.allocate(query.shape, query).zero_()
        first, *others = self._outs
        if not others:
            out = first.to(query.dtype)
        elif len(others) == 1 and first.dtype == others[0].dtype == self._lses[0].dtype == query.dtype:
            out = first.lerp_(others[0], torch.sigmoid(self._lses[1] - self._lses[0]))
        else:
            *weights, last = self._weights()
            summed = self._sum(self._outs[:-1], weights)
            # In another dtype than the query's it is rounded as it is written.
            out = summed if summed.dtype == query.dtype else collectives.allocate(query.shape, query)
            torch.addcmul(summed, others[-1], last, out=out)
        return out if fully_masked is None else out.masked_fill_(fully_masked, 0.0)

    def _weights(self) -> list[Tensor]:
        """Returns each block's share of every row, [B, Sq, H, 1]."""
        weights = torch.stack(self._lses).softmax(0)
        narrow = self._outs[0].dtype != torch.float32 and not self._in_float32
        return list((weights.to(self._outs[0].dtype) if narrow else weights).unbind(0))

    def _sum(self, outs: list[Tensor], weights: list[Tensor]) -> Tensor:
        summed = outs[0] * weights[0]
        for out, weight in zip(outs[1:], weights[1:], strict=True):
            summed.addcmul_(out, weight)
        return summed


Block = tuple[Tensor, Tensor]
Owners = tuple[int, ...]  # ring indices of the ranks that own a block's keys, in order
Slot = tuple[int, Tensor, Block]  # a block during rotation: its owner, its message, and the message's keys and values


def exchange(
    block: Block, key_counts: Sequence[int], mesh_dim: MeshDim, streams: Streams, options: EngineOptions
) -> Iterator[tuple[Owners, Block]]:
    """Yields (owners' indices, keys and values) of this rank's block, then of the others, sent as options say."""
    key, value = map(collectives.to_float8, block) if options.sends_float8 else block
    if options.rotate_method == "allgather":
        blocks = all_gather_blocks((key, value), key_counts, mesh_dim)
    else:
        blocks = rotate((key, value), key_counts, mesh_dim, streams)
    for number, (owners, (key, value)) in enumerate(blocks):
        # This rank's own block has not travelled, and is exact.
        if number == 0:
            yield owners, block
        elif options.sends_float8:
            yield owners, (collectives.from_float8(key, block[0].dtype), collectives.from_float8(value, block[1].dtype))
        else:
            yield owners, (key, value)


def rotate(
    block: Block, key_counts: Sequence[int], mesh_dim: MeshDim, streams: Streams | None = None
) -> Iterator[tuple[Owners, Block]]:
    """Yields (owner's index, keys and values): blocks travel from rank to rank, one hop while the caller computes.

    mesh_dim.size - 1 hops. Ask for the next block only after launching all work on the last one. With `streams` the
    next layer's messages get the same memory, unless they are large."""
    slots = _slots(block[0], key_counts, mesh_dim, streams)
    # A copy, to be sent: attention reads the local block from its original memory.
    torch.cat(block, out=slots[0][1].flatten(0, 1))
    for step, (owner, packed, received) in enumerate(slots):
        pending = collectives.ring_send_recv(packed, slots[step + 1][1], mesh_dim) if step + 1 < mesh_dim.size else None
        yield (owner,), received if step else block
        if pending is not None:
            pending.wait()


def _slots(key: Tensor, key_counts: Sequence[int], mesh_dim: MeshDim, streams: Streams | None) -> list[Slot]:
    """Returns the slot of each block in turn, the local one first; they alternate between two of the largest size."""
    batch, _, heads, dim = key.shape
    shapes = [(2, batch, count, heads, dim) for count in key_counts]
    largest = max(map(prod, shapes))

    def make(allocator: Callable[[Sequence[int], Tensor], Tensor]) -> list[Slot]:
        memory, slots = [allocator((largest,), key) for _ in range(2)], []
        for step in range(mesh_dim.size):
            owner = (mesh_dim.index - step) % mesh_dim.size
            packed = memory[step % 2].narrow(0, 0, prod(shapes[owner])).view(shapes[owner])
            slots.append((owner, packed, (packed[0], packed[1])))
        return slots

    if streams is None or largest * key.element_size() > SCRATCH_CACHE_BYTES:
        return make(collectives.allocate)
    kind = ("ring slots", key_counts, key.shape, key.dtype, torch.is_inference_mode_enabled())
    return streams.cached(kind, lambda: make(collectives.allocate_scratch))


def all_gather_blocks(block: Block, key_counts: Sequence[int], mesh_dim: MeshDim) -> Iterator[tuple[Owners, Block]]:
    """Yields the local block, then all others as one, gathered meanwhile. Extra memory: all keys and values."""
    packed = torch.cat([tensor.transpose(0, 1) for tensor in block], dim=2)
    pending = collectives.start_all_gather(packed, key_counts, mesh_dim, mesh_dim.other_ranks)
    yield (mesh_dim.index,), block
    (other_blocks,) = pending.wait()
    key, value = other_blocks.transpose(0, 1).chunk(2, 2)
    yield tuple(mesh_dim.other_ranks), (key, value)


CAT_DIMS = 4  # of what CUDA concatenates by one kernel
MAX_HEAD_CHUNKS = 2  # at most: more would make kernels too small
# Of queries, keys and values that a rank sends in a layer. What travels behind the first wave's kernels costs their
# launches once more, some 60 us; 32 MiB travel for 100 us at NVLink's speed.
MIN_HIDDEN_BYTES = 32 << 20

Counts = tuple[int, ...]
TokensByRank = tuple[Counts, Counts]  # tokens of each context rank: of the queries, of the keys


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
    `even`: all counts of all ranks are the same, on which every rank must agree."""

    runs: tuple[tuple[HeadRun, ...], ...]
    heads: Counts
    tokens: Counts
    index: int
    batch: int
    dim: int
    by_heads: Counts
    by_tokens: Counts
    even: bool

    @property
    def counts(self) -> tuple[list[int] | None, list[int] | None]:
        """Returns `by_heads` and `by_tokens` as all_to_all_single takes them."""
        return (None, None) if self.even else (list(self.by_heads), list(self.by_tokens))

    def segments(self, flat: Tensor, *, joined: bool) -> list[tuple[tuple[HeadRun, ...], Tensor]]:
        """Returns every tensor's runs, each with its part [ranks, own tokens, B, heads, D] as by `HeadRun.of`."""
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
    heads: Counts, parts: Parts, tokens: Counts, index: int, batch: int, dim: int, chunk: int, chunk_count: int
) -> AllToAllLayout:
    """Returns the layout of part `chunk` of tensors of `heads` each, of which ranks have the same multiples."""
    runs = []
    for of_all_ranks in heads:
        of_tensor, first = list[HeadRun](), 0
        for each, group in groupby(chunk_sizes(of_all_ranks, parts)):
            start, count = chunk_range(each, chunk_count, chunk)
            of_tensor.append(HeadRun(ranks=len(list(group)), first=first, heads=each, start=start, count=count))
            first += of_tensor[-1].ranks * each
        runs.append(tuple(of_tensor))
    assert len({tuple(run.ranks for run in of_tensor) for of_tensor in runs}) == 1
    counts = [[run.count for run in of_tensor for _ in range(run.ranks)] for of_tensor in runs]
    by_rank = [sum(of_rank) for of_rank in zip(*counts, strict=True)]
    own = tuple(of_tensor[index] for of_tensor in counts)
    by_heads = tuple(tokens[index] * batch * count * dim for count in by_rank)
    by_tokens = tuple(size * batch * sum(own) * dim for size in tokens)
    return AllToAllLayout(
        runs=tuple(runs), heads=own, tokens=tokens, index=index, batch=batch, dim=dim, by_heads=by_heads,
        by_tokens=by_tokens, even=len(set(tokens)) == len(set(by_rank)) == 1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadChunk:
    """Heads that are sent and attended to together; `first` is the first of this rank's query heads in it.

    `outbound` is one layout for queries, keys and values, or, where keys are other tokens, one for queries and one for
    keys and values; `inbound` is that of the output."""

    number: int
    first: int
    outbound: tuple[AllToAllLayout, ...]
    inbound: AllToAllLayout


def head_chunks(
    mesh: ContextMesh, query: Tensor, heads: tuple[int, int], tokens_by_rank: TokensByRank, same_tokens: bool,
    max_chunks: int = MAX_HEAD_CHUNKS, added: int = 0,
) -> tuple[HeadChunk, ...]:  # fmt: skip
    """Returns the head chunks, at most `max_chunks`, of queries [B, tokens, H, D] with `heads` heads, its own and the
    keys'; `same_tokens`: both are of the same tokens; D and `added` elements travel. () without Ulysses ranks."""
    mesh_dim, first = mesh.ulysses, mesh.ring.index * mesh.ulysses.size
    if mesh_dim.size == 1:
        return ()
    of_queries, of_keys = heads[:1], (heads[1], heads[1])
    queries, keys = (tokens[first : first + mesh_dim.size] for tokens in tokens_by_rank)
    outbound = [((*of_queries, *of_keys), queries)] if same_tokens else [(of_queries, queries), (of_keys, keys)]
    start, own = chunk_range(heads[0], mesh_dim.parts, mesh_dim.index)
    batch, dim = query.shape[0], query.shape[3] + added
    # The number of chunks follows from global counts alone: ranks that disagree would wait forever.
    elements = heads[0] * max(tokens_by_rank[0]) + 2 * heads[1] * max(tokens_by_rank[1])
    number = max_chunks if batch * query.shape[3] * query.element_size() * elements >= MIN_HIDDEN_BYTES else 1
    if heads[1] < heads[0] and any(each % MAX_HEAD_CHUNKS for each in chunk_sizes(heads[1], mesh_dim.parts)):
        number = 1

    def packed(heads: Counts, tokens: Counts, chunk: int) -> AllToAllLayout:
        return all_to_all_layout(heads, mesh_dim.parts, tokens, mesh_dim.index, batch, dim, chunk, number)

    chunks = []
    for chunk in range(number):
        sent, returned = tuple(packed(*each, chunk) for each in outbound), packed(of_queries, queries, chunk)
        first = start + chunk_range(own, number, chunk)[0]
        chunks.append(HeadChunk(number=chunk, first=first, outbound=sent, inbound=returned))
    return tuple(chunks)


def to_heads(
    tensors: Sequence[Tensor], layout: AllToAllLayout, mesh_dim: MeshDim, streams: Streams, use: Hashable
) -> Pending:
    """Sends the heads of each tensor [B, own tokens, H, D]; `split_received` takes what arrives. The next layer's
    transfer for the same `use` gets the same memory of `streams`."""
    send = streams.scratch(("send", use), (sum(layout.by_heads),), tensors[0])
    joined = all(map(_joined, tensors))
    for runs, segment in layout.segments(send, joined=joined):
        dim, parts = -1 if joined else -2, [run.of(x, joined=joined) for run, x in zip(runs, tensors, strict=True)]
        # CUDA's `cat` is one kernel for tensors of at most CAT_DIMS, and a copy for each tensor above
        # (ATen/native/cuda/Shape.cu).
        if segment.ndim <= CAT_DIMS:
            torch.cat(parts, dim=dim, out=segment)
            continue
        for entry in range(segment.shape[2]):
            torch.cat([part.select(2, entry) for part in parts], dim=dim, out=segment.select(2, entry))
    received = streams.scratch(("receive", use), (sum(layout.by_tokens),), tensors[0])
    return collectives.all_to_all(send, received, *layout.counts, mesh_dim)


def split_received(received: Tensor, layout: AllToAllLayout) -> tuple[Tensor, ...]:
    """Splits what arrived into views [B, all tokens, own heads, D] of each tensor."""
    full = received.view(sum(layout.tokens), layout.batch, sum(layout.heads), layout.dim)
    return full.transpose(0, 1).split(layout.heads, 2)


def to_tokens(full: Tensor, layout: AllToAllLayout, mesh_dim: MeshDim, streams: Streams, use: Hashable) -> Pending:
    """Sends [B, all tokens, local heads, D] of each rank back; `write_returned` takes what arrives."""
    send = full.transpose(0, 1).reshape(-1)
    received = streams.scratch(("return", use), (sum(layout.by_heads),), full)
    by_heads, by_tokens = layout.counts
    return collectives.all_to_all(send, received, by_tokens, by_heads, mesh_dim)


def write_returned(returned: Tensor, layout: AllToAllLayout, out: Tensor) -> None:
    """Writes the heads that came back to this rank into `out` [B, own tokens, H, D]."""
    joined = _joined(out)
    for (run,), segment in layout.segments(returned, joined=joined):
        run.of(out, joined=joined).copy_(segment)


def _joined(tensor: Tensor) -> bool:
    """Do heads and D of [B, tokens, H, D] lie in memory as one dim?"""
    return tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]
