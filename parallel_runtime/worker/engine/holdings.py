"""What a rank holds of the streams of an attention, and which part of it is its own: the tokens that it attends for.

Cut streams are held as the own chunk, or as a stand-in where that is empty; replicated ones are held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sizes import chunk_range

Whole = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Part:
    """`held` tokens of one stream, of which `own` from `start` on are the rank's own."""

    held: int
    start: int
    own: int
    replica: bool

    @classmethod
    def of(cls, length: int, parts: int, index: int, replica: bool) -> Part:
        start, own = chunk_range(length, parts, index)
        if replica:
            return cls(held=length, start=start, own=own, replica=True)
        return cls(held=max(own, min(length, 1)), start=0, own=own, replica=False)

    def restore(self, own: Tensor, whole: Whole) -> Tensor:
        """What is held again: all ranks' tokens of a replica, and zeros for a stand-in."""
        if self.replica:
            return whole(own, self.held)
        return own if self.held == self.own else own.new_zeros((own.shape[0], self.held, *own.shape[2:]))


@dataclass(frozen=True)
class Holding:
    """The parts of streams that are concatenated."""

    parts: Sequence[Part]

    @property
    def size(self) -> int:
        return sum(part.held for part in self.parts)

    @property
    def _all_own(self) -> bool:
        return not any(part.replica or part.held != part.own for part in self.parts)

    def drop(self, held: Tensor, dim: int = 1) -> Tensor:
        """The own tokens alone."""
        if self._all_own:
            return held
        pieces = zip(held.split([part.held for part in self.parts], dim), self.parts, strict=True)
        return torch.cat([piece.narrow(dim, part.start, part.own) for piece, part in pieces], dim)

    def restore(self, out: Tensor, whole: Whole) -> Tensor:
        """The way back, along dim 1. `whole` makes a replica of the own chunks of all ranks, given its length."""
        if self._all_own:
            return out
        pieces = zip(out.split([part.own for part in self.parts], 1), self.parts, strict=True)
        return torch.cat([part.restore(piece, whole) for piece, part in pieces], 1)
