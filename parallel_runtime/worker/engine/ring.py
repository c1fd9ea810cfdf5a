"""Attention against the key and value blocks of a whole ring: rotated point to point, or collected at once.

Blocks are [tokens, batch, heads, head_dim]; `sizes` are the tokens of each rank's block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ...specs import RotateMethod
from .exchange import allocate, gather, hop
from .mesh import Axis

Block = tuple[Tensor, Tensor]


def visit(block: Block, sizes: Sequence[int], axis: Axis, method: RotateMethod) -> Iterator[tuple[int, Block]]:
    """(owner's index, its keys and values) of every rank, this rank's own first. No sizes are exchanged."""
    return (rotate if method == "alltoall" else collect)(block, sizes, axis)


def rotate(block: Block, sizes: Sequence[int], axis: Axis) -> Iterator[tuple[int, Block]]:
    """Blocks travel from rank to rank; the next one arrives while the caller computes on this one.

    axis.size - 1 hops. Extra memory: two of the largest blocks, for a caller that keeps none; another one where
    `block` is not contiguous.
    """
    spares: list[Block] = []
    held = _contiguous(block)
    for step in range(axis.size):
        coming = None
        if step + 1 < axis.size:
            if len(spares) < 2:
                spares.append(_spare(block, max(sizes)))
            size = sizes[(axis.index - step - 1) % axis.size]
            coming = hop(held, [tensor[:size] for tensor in spares[step % 2]], axis)
        yield (axis.index - step) % axis.size, held
        if coming is not None:
            held = tuple(coming.wait())  # type: ignore[assignment]


def collect(block: Block, sizes: Sequence[int], axis: Axis) -> Iterator[tuple[int, Block]]:
    """All blocks at once, while the caller computes on its own. Extra memory: the keys and values of the ring."""
    pending = [gather(tensor, sizes, axis) for tensor in block]
    yield axis.index, block
    keys, values = (part.wait()[0].split(list(sizes)) for part in pending)
    for step in range(1, axis.size):
        owner = (axis.index + step) % axis.size
        yield owner, (keys[owner], values[owner])


def _contiguous(block: Block) -> Block:
    key, value = (part.contiguous() for part in block)
    return key, value


def _spare(block: Block, tokens: int) -> Block:
    key, value = (allocate((tokens, *part.shape[1:]), part) for part in block)
    return key, value
