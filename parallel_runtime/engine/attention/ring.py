"""Attention against the key and value blocks of a whole ring: rotated point to point, or collected at once.

A block that rotates is one message, [2, batch, tokens, heads, head_dim]: its keys, then its values. Blocks that are
collected come tokens first, [tokens, batch, 2 * heads, head_dim], and are one block then. No sizes are exchanged. Keys
and values have one shape and dtype. Both are packed by `cat` in 4 dims, which is one kernel on CUDA; `stack`, in 5,
would be two copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from ...request import EngineOptions
from ..comm.collectives import all_gather_others, allocate, allocate_scratch, ring_send_recv
from ..comm.float8 import from_float8, to_float8
from ..comm.mesh import MeshDim
from ..split.streams import SCRATCH_CACHE_BYTES, Streams

Block = tuple[Tensor, Tensor]
Owners = tuple[int, ...]  # ring indices of the ranks that own a block's keys, in order
Slot = tuple[int, Tensor, Block]  # a block during rotation: its owner, its message, and the message's keys and values


def exchange(
    block: Block, key_counts: Sequence[int], mesh_dim: MeshDim, streams: Streams, options: EngineOptions
) -> Iterator[tuple[Owners, Block]]:
    """Yields (owners' indices, keys and values) of the rank's own block, from its original memory, then of the others,
    which are sent as these options say."""
    key, value = map(to_float8, block) if options.sends_float8 else block
    if options.rotate_method == "allgather":
        blocks = all_gather_blocks((key, value), key_counts, mesh_dim)
    else:
        blocks = rotate((key, value), key_counts, mesh_dim, streams)
    for number, (owners, (key, value)) in enumerate(blocks):
        if number == 0:
            yield owners, block
        elif options.sends_float8:
            yield owners, (from_float8(key, block[0].dtype), from_float8(value, block[1].dtype))
        else:
            yield owners, (key, value)


def rotate(
    block: Block, key_counts: Sequence[int], mesh_dim: MeshDim, streams: Streams | None = None
) -> Iterator[tuple[Owners, Block]]:
    """Yields (owner's index, keys and values): blocks travel from rank to rank, one hop while the caller computes.

    mesh_dim.size - 1 hops. Ask for the next block only after launching all work on the last one. With `streams` the
    next layer's messages get the same memory, unless they are large.
    """
    slots = _slots(block[0], key_counts, mesh_dim, streams)
    torch.cat(block, out=slots[0][1].flatten(0, 1))
    for step, (owner, packed, received) in enumerate(slots):
        pending = ring_send_recv(packed, slots[step + 1][1], mesh_dim) if step + 1 < mesh_dim.size else None
        yield (owner,), received if step else block
        if pending is not None:
            pending.wait()


def _slots(key: Tensor, key_counts: Sequence[int], mesh_dim: MeshDim, streams: Streams | None) -> list[Slot]:
    """Returns the slot of each block in turn, the local one first; they alternate between two of the largest size.

    The local block is copied there to be sent; attention reads it from its original memory.
    """
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
        return make(allocate)
    kind = ("ring slots", key_counts, key.shape, key.dtype, torch.is_inference_mode_enabled())
    return streams.cached(kind, lambda: make(allocate_scratch))


def all_gather_blocks(block: Block, key_counts: Sequence[int], mesh_dim: MeshDim) -> Iterator[tuple[Owners, Block]]:
    """Yields the local block, then all others as one, gathered meanwhile. Extra memory: all keys and values."""
    packed = torch.cat([tensor.transpose(0, 1) for tensor in block], dim=2)
    pending = all_gather_others(packed, key_counts, mesh_dim)
    yield (mesh_dim.index,), block
    (other_blocks,) = pending.wait()
    key, value = other_blocks.transpose(0, 1).chunk(2, 2)
    yield tuple(mesh_dim.other_ranks), (key, value)
