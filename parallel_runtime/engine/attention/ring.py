"""Attention against the key and value blocks of a whole ring: rotated point to point, or collected at once.

A block that rotates is one message, [2, batch, tokens, heads, head_dim]: its keys, then its values. Blocks that are
collected come tokens first, [tokens, batch, 2 * heads, head_dim], and are one block then. No sizes are exchanged.
Both are packed by `cat` in 4 dims, which is one kernel on CUDA; `stack`, in 5, would be two copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import ScratchAllocator, all_gather_others, ring_send_recv
from ..comm.mesh import MeshDim

Block = tuple[Tensor, Tensor]
Owners = tuple[int, ...]  # ring indices of the ranks that own a block's keys, in order


@dataclass(frozen=True, kw_only=True, eq=False)
class RingSlot:
    """A block during rotation: its owner's ring index, the message that is sent, and its keys and values as views."""

    owner: int
    packed: Tensor
    block: Block


def ring_slots(block: Block, key_counts: Sequence[int], mesh_dim: MeshDim, scratch: ScratchAllocator) -> list[RingSlot]:
    """Returns the buffer of each block in turn, the local block first; they alternate between two of the largest size.

    The local block is copied there to be sent; attention reads it from its original memory.
    """
    batch, _, heads, dim = block[0].shape
    per_token = 2 * batch * heads * dim
    memory = [scratch((per_token * max(key_counts),), use) for use in ("even blocks", "odd blocks")]
    slots = []
    for step in range(mesh_dim.size):
        owner = (mesh_dim.index - step) % mesh_dim.size
        packed = memory[step % 2].narrow(0, 0, per_token * key_counts[owner])
        packed = packed.view(2, batch, key_counts[owner], heads, dim)
        slots.append(RingSlot(owner=owner, packed=packed, block=(packed[0], packed[1])))
    return slots


def packed_bytes(block: Block, key_counts: Sequence[int]) -> int:
    """Returns the bytes of the message of the ring's largest block."""
    batch, _, heads, dim = block[0].shape
    return 2 * batch * max(key_counts) * heads * dim * block[0].element_size()


def rotate(block: Block, slots: Sequence[RingSlot], mesh_dim: MeshDim) -> Iterator[tuple[Owners, Block]]:
    """Yields (owner's index, keys and values): blocks travel from rank to rank, one hop while the caller computes.

    mesh_dim.size - 1 hops. Ask for the next block only after launching all work on the last one.
    """
    torch.cat(block, out=slots[0].packed.flatten(0, 1))
    for step, slot in enumerate(slots):
        pending = ring_send_recv(slot.packed, slots[step + 1].packed, mesh_dim) if step + 1 < mesh_dim.size else None
        yield (slot.owner,), slot.block if step else block
        if pending is not None:
            pending.wait()


def all_gather_blocks(block: Block, key_counts: Sequence[int], mesh_dim: MeshDim) -> Iterator[tuple[Owners, Block]]:
    """Yields the local block, then all others as one, gathered meanwhile. Extra memory: all keys and values."""
    packed = torch.cat([tensor.transpose(0, 1) for tensor in block], dim=2)
    pending = all_gather_others(packed, key_counts, mesh_dim)
    yield (mesh_dim.index,), block
    (other_blocks,) = pending.wait()
    key, value = other_blocks.transpose(0, 1).chunk(2, 2)
    yield tuple(mesh_dim.other_ranks), (key, value)
