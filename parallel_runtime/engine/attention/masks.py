"""Masks over split streams, by block of keys: key masks, which are checked and gathered, and masks of pairs of tokens,
of which every rank has the full mask and takes the rows of its queries. Knows no kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...architectures.split_plan import Names
from ...errors import Unsplittable
from ..comm.collectives import all_gather_v
from ..comm.mesh import ContextMesh, MeshDim
from ..split.streams import Streams
from .dispatch import MaskKind

Spans = tuple[tuple[int, int], ...]  # of keys: (start, size) of each


class Mask:
    """The mask of all keys of an attention, for the queries of this rank: `pairs` [1 or B, 1 or heads, 1 or queries,
    keys], bool or additive float, keys in context order.

    What layers ask for repeatedly is cached. `kind` is the same on all ranks, however few heads and
    queries one has."""

    def __init__(self, pairs: Tensor, kind: MaskKind) -> None:
        self.pairs = pairs
        self.kind = kind
        self._cache: dict[Hashable, Any] = {}

    def block(self, start: int, size: int) -> Tensor:
        """Returns [1 or B, 1 or heads, 1 or queries, size] of the keys from `start` on, for PyTorch's attention."""
        return self._cached(("block", start, size), lambda: self.pairs[..., start : start + size].contiguous())

    def bias(self, spans: Spans, dtype: torch.dtype) -> Tensor:
        """Returns the mask of several such spans of keys, one after the other, as a finite bias; see `additive`."""
        key = ("bias", spans, dtype)
        return self._cached(key, lambda: additive(torch.cat([self.block(*span) for span in spans], -1), dtype))

    def heads(self, start: int, size: int) -> Mask:
        """Returns the mask of some of the heads."""
        if self.pairs.shape[1] == 1:
            return self
        return self._cached(("heads", start, size), lambda: Mask(self.pairs[:, start : start + size], self.kind))

    def fully_masked(self) -> Tensor:
        """Returns [1 or B, 1 or queries, 1 or heads, 1]: True where a query has no key, so that its output is zero."""

        def find() -> Tensor:
            seen = self.pairs if self.pairs.dtype == torch.bool else self.pairs > -torch.inf
            return ~seen.any(dim=-1, keepdim=True).transpose(1, 2)

        return self._cached("fully masked", find)

    def hides(self, start: int, size: int) -> bool:
        """Returns whether it is known that no query sees these keys."""
        # On a GPU a fully hidden block merges with weight 0 anyway, and to look would wait for the device.
        if self.pairs.device.type != "cpu" or self.pairs.dtype != torch.bool:
            return False
        return self._cached(("hides", start, size), lambda: not self.pairs[..., start : start + size].any().item())

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def _pair(pairs: Tensor, *, of_queries: bool = True) -> Mask:
    """Returns a mask of `pairs`, which differ between this rank's queries if `of_queries`. Numbers but 0 attend."""
    if not pairs.is_floating_point() and pairs.dtype != torch.bool:
        pairs = pairs != 0
    return Mask(pairs, (pairs.dtype, pairs.shape[0] > 1, pairs.shape[1] > 1, of_queries))


def _key(keys: Tensor) -> Mask:
    """Returns the mask `keys` [S, B, 1 or heads], which is the same for all queries."""
    return _pair(keys.permute(1, 2, 0).unsqueeze(2), of_queries=False)


def memory_key(mask: Tensor) -> Hashable:
    """Returns a key that is equal for tensors that show the same values, as long as one of them is alive."""
    version = None if mask.is_inference() else mask._version
    storage = mask.untyped_storage()._cdata
    return storage, mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, version


def gather_key_mask(mask: Tensor, batch: int, heads: int, streams: Streams, names: Names, mesh_dim: MeshDim) -> Mask:
    """Returns the mask of all keys, gathered from each rank's slice of it (or taken from the full mask, if it was not
    split).

    `mask` is [B, S] bool or int (non-zero: attend), [B, S] additive float, or [B, 1 or heads, 1, S] of either; `names`
    are the attention's streams, in the order in which its keys are concatenated. Raises Refused for masks that differ
    between queries: a rank sees only its own."""
    keys = _tokens_first(mask, batch, heads)
    sizes, total = streams.tokens_by_rank(names), streams.total(names)
    local = sizes[mesh_dim.index]
    if keys.shape[0] not in (local, total):
        raise Unsplittable(f"the mask covers {keys.shape[0]} keys, but this rank has {local} of {total}")
    if keys.shape[0] != local:
        if not streams.any_rank_has_all(names):
            return _key(keys.index_select(0, streams.global_positions(names, keys.device)))
        keys = keys.index_select(0, streams.global_positions(names, keys.device, [mesh_dim.index]))
    to_send = keys.to(torch.uint8) if keys.dtype == torch.bool else keys
    (full,) = all_gather_v(to_send, sizes, mesh_dim).wait()
    return _key(full.to(keys.dtype))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `mask` as a finite bias, with a huge negative number for -inf."""
    # So that a block whose keys are all masked has a log-sum-exp that vanishes in the merge. With -inf itself kernels
    # return 0 there, or NaN.
    floor = torch.finfo(dtype).min / 2
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, floor)
    return mask.clamp_min(floor).to(dtype)


def _tokens_first(mask: Tensor, batch: int, heads: int) -> Tensor:
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    shape = tuple(mask.shape)
    if mask.ndim != 4 or shape[2] != 1 or shape[1] not in (1, heads) or shape[0] not in (1, batch):
        raise Unsplittable(f"a mask of {shape} differs between queries: only [{batch}, 1, 1, keys] can be split")
    return mask.expand(batch, -1, -1, -1).squeeze(2).permute(2, 0, 1)


def pair_mask(mask: Tensor, streams: Streams, queries: Names, keys: Names, mesh: ContextMesh) -> Mask:
    """Returns the part of `mask` for this rank's queries: it is [1 or B, 1 or heads, queries, keys], of all tokens."""
    if tuple(mask.shape[-2:]) != (streams.total(queries), streams.total(keys)):
        pairs = f"{streams.total(queries)} x {streams.total(keys)}"
        made = f"{mask.shape[-2]} x {mask.shape[-1]}"
        raise Unsplittable(f"a mask of {made} pairs of tokens was made from a part of {pairs}")
    first = mesh.ring.index * mesh.ulysses.size
    positions = streams.global_positions(queries, mask.device, range(first, first + mesh.ulysses.size))
    return _pair(mask.index_select(-2, positions).index_select(-1, streams.global_positions(keys, mask.device)))


def patch_mask(mask: Tensor, batch: int, heads: int, streams: Streams, queries: Names, keys: Names) -> Mask:
    """Returns the current token patch's rows of a mask of all queries and all keys, in the streams' order."""
    pairs = mask.ndim == 4 and mask.shape[2] > 1
    if mask.shape[-1] != streams.total(keys) or (pairs and mask.shape[2] != streams.total(queries)):
        raise Unsplittable(f"a mask of {list(mask.shape)} is of a patch of {streams.total(keys)} keys", "patches")
    if not pairs:
        return _key(_tokens_first(mask, batch, heads))
    return _pair(mask.index_select(-2, streams.global_positions(queries, mask.device)))
