"""One decode or encode of a VAE that computes tiles of clips, each by itself: every rank computes some of them, by its
share, and sends them to rank 0, which blends all of them as one process would.

With two equal ranks and three tiles rank 0 computes tiles 0 and 2, and rank 1 tile 1. Each rank runs the whole method,
so that all see the same tiles in the same order; where another rank's tile would be needed, a rank other than 0 goes on
with a tensor of its shape that has no values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...architectures.autoencoders import Tiles
from ...errors import Unsplittable
from ...specs import VAEMethod
from ..comm.collectives import Pending, allocate, send_recv
from ..comm.mesh import MeshDim

META = torch.device("meta")


def run_tiles(
    model: Any,
    tiles: Tiles,
    method: VAEMethod,
    x: Tensor,
    ranks: MeshDim,
    device: torch.device,
    *,
    place: Tensor | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """Returns `model.decode(x)` or `model.encode(x)` on rank 0, in `place` where there is one; a tensor without values
    on other ranks. `tick` is called before each tile, on every rank. Collective."""
    compute, owners = getattr(model, getattr(tiles, method)), _owners(ranks.shares or (1,) * ranks.size)
    first, sent = ranks.index == 0, list[tuple[Pending, Tensor]]()

    def tile_or_stand_in(tile: Tensor) -> Tensor:
        tick()
        owner, shape = next(owners), tiles.output(model, method, tuple(tile.shape))
        if first and owner:
            (received,) = send_recv({}, {owner: allocate(shape, tile)}, ranks).wait()
            return received
        if owner != ranks.index:
            return torch.empty(shape, dtype=tile.dtype, device=META)
        made: Tensor = compute(tile)
        if tuple(made.shape) != shape:
            raise Unsplittable(f"a worker made {tuple(made.shape)} where {shape} was expected")
        if first:
            return made
        while sent:  # so that no more than one waits in memory for rank 0
            sent.pop()[0].wait()
        sent.append((send_recv({0: made}, {}, ranks), made))
        return made.to(META)

    same = copy.copy(model)  # its layers are those of `model`
    setattr(same, getattr(tiles, method), tile_or_stand_in)
    if method == "encode":
        output: Tensor = same.encode(x, device=device)
    else:
        shape = tuple(same.decode_output_shape(tuple(x.shape)))
        buffer = place if first and place is not None else torch.empty(shape, device="cpu" if first else META)
        output = same.decode(x.to(device), output_buffer=buffer)
    for pending, _ in sent:
        pending.wait()
    if first and place is not None and output is not place:
        place.copy_(output)
    return output


def _owners(shares: Sequence[int]) -> Iterator[int]:
    """Yields the rank of each tile: the one that has the fewest for its share, the first of several."""
    done = [0] * len(shares)
    while True:
        owner = min(range(len(shares)), key=lambda rank: (done[rank] + 1) / shares[rank])
        done[owner] += 1
        yield owner
