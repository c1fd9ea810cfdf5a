"""Attention against the key and value blocks of a whole ring: rotated point to point, or collected at once.

A block that rotates is one message, [2, batch, tokens, heads, head_dim]: its keys, then its values. Blocks that are
collected come tokens first, [tokens, batch, 2, heads, head_dim], and are one block then. No sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .exchange import Spare, gather_others, hop
from .mesh import Axis

Block = tuple[Tensor, Tensor]
Owners = tuple[int, ...]  # whose keys a block has, in this order


@dataclass(frozen=True, kw_only=True, eq=False)
class Stop:
    """A block on its way through this rank: whose it is, its memory as it travels, its keys and values."""

    owner: int
    packed: Tensor
    block: Block


def stops(block: Block, sizes: Sequence[int], axis: Axis, spare: Spare) -> list[Stop]:
    """Where each block is while it is here, this rank's own first: all take turns in two of the largest.

    The own block, too: when its turn is over it has been sent, and who attends to it does so where it came from.
    """
    batch, _, heads, dim = block[0].shape
    per_token = 2 * batch * heads * dim
    memory = [spare((per_token * max(sizes),), use) for use in ("even blocks", "odd blocks")]
    made = []
    for step in range(axis.size):
        owner = (axis.index - step) % axis.size
        packed = memory[step % 2].narrow(0, 0, per_token * sizes[owner])
        packed = packed.view(2, batch, sizes[owner], heads, dim)
        made.append(Stop(owner=owner, packed=packed, block=(packed[0], packed[1])))
    return made


def packed_bytes(block: Block, sizes: Sequence[int]) -> int:
    """What the largest block of the ring takes as it travels."""
    batch, _, heads, dim = block[0].shape
    return 2 * batch * max(sizes) * heads * dim * block[0].element_size()


def rotate(block: Block, stops: Sequence[Stop], axis: Axis) -> Iterator[tuple[Owners, Block]]:
    """(owner's index, keys and values): blocks travel from rank to rank, one hop while the caller computes.

    axis.size - 1 hops. Who asks for the next block must have begun all work on the last one.
    """
    torch.stack(block, out=stops[0].packed)
    for step, here in enumerate(stops):
        coming = hop(here.packed, stops[step + 1].packed, axis) if step + 1 < axis.size else None
        yield (here.owner,), here.block if step else block
        if coming is not None:
            coming.wait()


def collect(block: Block, sizes: Sequence[int], axis: Axis) -> Iterator[tuple[Owners, Block]]:
    """The own block, then all others as one, which travel meanwhile. Extra memory: the keys and values of the ring."""
    packed = torch.stack([tensor.transpose(0, 1) for tensor in block], dim=2)
    pending = gather_others(packed, sizes, axis)
    yield (axis.index,), block
    (others,) = pending.wait()
    key, value = others.transpose(0, 1).unbind(2)
    yield tuple(axis.others), (key, value)
