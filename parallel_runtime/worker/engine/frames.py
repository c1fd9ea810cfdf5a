"""The tokens of a rank, filled up to whole frames for what reshapes them so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Held tokens in whole frames: `tokens` of them from frame `first` to `last`, behind `front` that are filled in."""

    first: int
    last: int
    front: int
    tokens: int
    size: int  # of a frame

    @classmethod
    def of(cls, start: int, held: int, tokens: int, frames: int) -> Part:
        """Of `held` tokens from `start` on, where the first `tokens` of all are of so many `frames`."""
        size = tokens // frames
        end = min(start + held, tokens)
        if start >= end:  # none of a frame: the module still wants one
            return cls(first=0, last=1, front=0, tokens=0, size=size)
        first = start // size
        return cls(first=first, last=-(-end // size), front=start - first * size, tokens=end - start, size=size)

    @property
    def length(self) -> int:
        return (self.last - self.first) * self.size

    def fill(self, held: Tensor) -> Tensor:
        own, others = held[:, : self.tokens], held[:, self.tokens :]
        before, behind = (
            held.new_zeros(held.shape[0], count, *held.shape[2:])
            for count in (self.front, self.length - self.front - self.tokens)
        )
        return torch.cat([before, own, behind, others], 1)

    def drop(self, filled: Tensor) -> Tensor:
        return torch.cat([filled[:, self.front : self.front + self.tokens], filled[:, self.length :]], 1)
