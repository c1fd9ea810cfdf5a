"""Attention over blocks of keys, merged by log-sum-exp: any order of blocks gives the attention over all of them.
Rings merge so, of attentions (context_attention.py) and of VAEs (rows/functions.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.collectives import allocate

MAX_PENDING_BLOCKS = 8  # blocks that are merged at once; more would take more memory


class Merge:
    """Attention over the blocks added so far. Blocks wait until there are several, or no more: then their outputs are
    read once each, into one sum."""

    def __init__(self, *, in_float32: bool) -> None:
        self._in_float32 = in_float32
        self._outs: list[Tensor] = []
        self._lses: list[Tensor] = []

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Adds a block's output [B, Sq, H, D] and log-sum-exp [B, Sq, H, 1], which must be finite. Keeps both, and may
        write into them."""
        if len(self._outs) == MAX_PENDING_BLOCKS:
            weights, lse_of_all = self._weights(), torch.logsumexp(torch.stack(self._lses), 0)
            self._outs, self._lses = [self._sum(self._outs, weights)], [lse_of_all]
        self._outs.append(out)
        self._lses.append(lse)

    def result(self, query: Tensor, fully_masked: Tensor | None) -> Tensor:
        """Returns [B, Sq, H, D] in the query's dtype: zero where nothing was added, or where `fully_masked` is set."""
        if not self._outs:
            return allocate(query.shape, query).zero_()
        out = self._merged(query)
        return out if fully_masked is None else out.masked_fill_(fully_masked, 0.0)

    def _merged(self, query: Tensor) -> Tensor:
        """A single block is the result; two of the query's dtype are interpolated; others are summed by weights."""
        if len(self._outs) == 1:
            return self._outs[0].to(query.dtype)
        first, second = self._outs[:2]
        if len(self._outs) == 2 and first.dtype == second.dtype == self._lses[0].dtype == query.dtype:
            return first.lerp_(second, torch.sigmoid(self._lses[1] - self._lses[0]))
        *weights, last = self._weights()
        summed = self._sum(self._outs[:-1], weights)
        if summed.dtype == query.dtype:
            return summed.addcmul_(self._outs[-1], last)
        out = allocate(query.shape, query)  # rounded as it is written
        return torch.addcmul(summed, self._outs[-1], last, out=out)

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
