"""Attention over blocks of keys, merged by log-sum-exp: any order of blocks gives the attention over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import allocate


class Merge:
    """Running attention over the blocks added so far; memory is one output and one log-sum-exp."""

    def __init__(self, *, in_float32: bool) -> None:
        self._in_float32 = in_float32
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """A block's output [B, Sq, H, D] and log-sum-exp [B, Sq, H, 1]; both must be finite. May keep both."""
        if self._in_float32 and out.dtype in (torch.float16, torch.bfloat16):
            out = out.float()
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        self._out.lerp_(out, torch.sigmoid(lse - self._lse).to(out.dtype))
        self._lse = torch.logaddexp(self._lse, lse)

    def result(self, query: Tensor, dead: Tensor | None) -> Tensor:
        """[B, Sq, H, D] in the query's dtype: zero where nothing was added, and where `dead` (broadcast) says so."""
        if self._out is None:
            return allocate(query.shape, query).zero_()
        out = self._out.to(query.dtype)
        return out if dead is None else out.masked_fill_(dead, 0.0)
