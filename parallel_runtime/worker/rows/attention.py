"""A VAE's attention over the pixels of all ranks: keys and values go round in a ring, queries stay where they are.

No rank ever holds all keys, which in a large video would set the peak, and no kernel depends on free memory.
"""

from __future__ import annotations

from torch import Tensor

from ..engine.exchange import allocate
from ..engine.kernels import attend_block
from ..engine.merge import Merge
from ..engine.ring import rotate, stops
from .share import Share


def attend(share: Share, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One head over all pixels: [B, C, (T,) rows, columns] of this rank each, and so is the result. Collective."""
    tokens = key.flatten(2).shape[2]
    sizes = [tokens // share.own * units for units in share.units]
    share.factor(query, "attention")
    merge = Merge(in_float32=True)
    asking, block = _batch_first(query), (_batch_first(key), _batch_first(value))
    places = stops(block, sizes, share.ranks, lambda shape, _: allocate(shape, query))
    for _, (keys, values) in rotate(block, places, share.ranks):
        merge.add(*attend_block(asking, keys, values, None, None, "auto"))
    return merge.result(asking, None)[:, :, 0].transpose(1, 2).reshape(query.shape)


def _batch_first(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2).unsqueeze(2).contiguous()
