"""Masks over pairs of tokens: every rank holds the whole mask, and takes the rows of its queries. Knows no kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import Refused
from .masks import Mask, ToldApart, known_to_hide
from .mesh import ContextMesh
from .streams import chunk_range


class PairMask(Mask):
    """[1 or B, 1 or heads, queries of this rank's Ulysses group, all keys in context order], bool or additive float."""

    def __init__(self, pairs: Tensor, told_apart: ToldApart | None = None) -> None:
        super().__init__(told_apart or (pairs.dtype, pairs.shape[0] > 1, pairs.shape[1] > 1, True))
        self.pairs = pairs

    def _block(self, start: int, size: int) -> Tensor:
        return self.pairs[..., start : start + size].contiguous()

    def _heads(self, start: int, size: int) -> PairMask:
        return self if self.pairs.shape[1] == 1 else PairMask(self.pairs[:, start : start + size], self.told_apart)

    def _dead(self) -> Tensor:
        alive = self.pairs if self.pairs.dtype == torch.bool else self.pairs > -torch.inf
        return ~alive.any(dim=-1, keepdim=True).transpose(1, 2)

    def _hides(self, start: int, size: int) -> bool:
        return known_to_hide(self.pairs[..., start : start + size])


def pair_mask(mask: Tensor, queries: Sequence[int], keys: Sequence[int], mesh: ContextMesh) -> PairMask:
    """From `mask` [1 or B, 1 or heads, queries, keys] of all tokens, given the lengths of both sides' streams."""
    if tuple(mask.shape[-2:]) != (sum(queries), sum(keys)):
        raise Refused(
            f"a mask of {mask.shape[-2]} x {mask.shape[-1]} pairs of tokens was made from a part of {sum(queries)} x "
            f"{sum(keys)}; it cannot be made whole again: set ring and Ulysses degrees to 1"
        )
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        mask = mask != 0
    parts, group = mesh.context.size, mesh.ulysses.size
    first = mesh.ring.index * group
    rows = _places(queries, parts, range(first, first + group), mask.device)
    columns = _places(keys, parts, range(parts), mask.device)
    return PairMask(mask.index_select(-2, rows).index_select(-1, columns))


def _places(lengths: Sequence[int], parts: int, ranks: range, device: torch.device) -> Tensor:
    """Where the tokens of these ranks are among all, rank by rank."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    chunks = []
    for rank in ranks:
        for start, length in zip(starts, lengths, strict=True):
            first, size = chunk_range(length, parts, rank)
            chunks.append(torch.arange(start + first, start + first + size, device=device))
    return torch.cat(chunks)
