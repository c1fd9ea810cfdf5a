"""Masks over pairs of tokens: every rank holds the whole mask, and takes the rows of its queries. Knows no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .mesh import ContextMesh
from .sizes import chunk_range


@dataclass(frozen=True, eq=False)
class PairMask:
    """[1 or B, 1 or heads, queries of this rank's Ulysses group, all keys in context order], bool or additive float."""

    pairs: Tensor

    def block(self, start: int, size: int) -> Tensor:
        """The mask of the keys from `start` on, as scaled_dot_product_attention takes it."""
        return self.pairs[..., start : start + size].contiguous()

    def heads(self, start: int, size: int) -> PairMask:
        """The same for some of the heads."""
        return self if self.pairs.shape[1] == 1 else PairMask(self.pairs[:, start : start + size])

    def dead(self) -> Tensor:
        """[1 or B, queries, 1 or heads, 1]: True where a query has no key at all, in which case its output is zero."""
        alive = self.pairs if self.pairs.dtype == torch.bool else self.pairs > -torch.inf
        return ~alive.any(dim=-1, keepdim=True).transpose(1, 2)


def pair_mask(mask: Tensor, queries: Sequence[int], keys: Sequence[int], mesh: ContextMesh) -> PairMask:
    """From `mask` [1 or B, 1 or heads, queries, keys] of all tokens, given the lengths of both sides' streams."""
    if tuple(mask.shape[-2:]) != (sum(queries), sum(keys)):
        raise ValueError(
            f"a mask of {mask.shape[-2]} x {mask.shape[-1]} pairs of tokens was made from a part of {sum(queries)} x "
            f"{sum(keys)}; it cannot be made whole again: set ring and Ulysses degrees to 1"
        )
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        mask = mask != 0
    parts, group = mesh.context.size, mesh.ulysses.size
    first = mesh.ring.index * group
    rows = _places(queries, parts, range(first, first + group)).to(mask.device)
    columns = _places(keys, parts, range(parts)).to(mask.device)
    return PairMask(mask.index_select(-2, rows).index_select(-1, columns))


def _places(lengths: Sequence[int], parts: int, ranks: range) -> Tensor:
    """Where the tokens of these ranks are among all, rank by rank."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    chunks = []
    for rank in ranks:
        for start, length in zip(starts, lengths, strict=True):
            first, size = chunk_range(length, parts, rank)
            chunks.append(torch.arange(start + first, start + first + size))
    return torch.cat(chunks)
