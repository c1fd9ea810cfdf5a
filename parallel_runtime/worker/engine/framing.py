"""Modules that reshape their tokens by frames, run on the part of them that a rank holds: filled up to whole frames.

Knows no attention: in such a module each frame attends to keys of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...plan import Frames
from .cuts import Cuts
from .sites import Block


@dataclass(frozen=True)
class _Part:
    """Held tokens in whole frames: `tokens` of them from frame `first` to `last`, behind `front` that are filled in."""

    first: int
    last: int
    front: int
    tokens: int
    size: int  # of a frame

    @classmethod
    def of(cls, start: int, held: int, tokens: int, frames: int) -> _Part:
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


def frame(block: Block, frames: Frames, cuts: Cuts) -> list[RemovableHandle]:
    """Have `block` see whole frames, and its caller what it passed."""
    parts: list[_Part | None] = []  # of the calls that run
    return [
        block.module.register_forward_pre_hook(partial(_fill, block, frames, cuts, parts), with_kwargs=True),
        block.module.register_forward_hook(partial(_drop, parts)),
    ]


@torch.compiler.disable
def _fill(
    block: Block, frames: Frames, cuts: Cuts, parts: list[_Part | None], _: nn.Module, args: Any, kwargs: Any
) -> Any:
    block.check(args, kwargs)
    given = block.named(args, kwargs)
    tokens, total, held = given[frames.tokens], cuts.total((frames.stream,)), cuts.held((frames.stream,))
    parts[:] = [None]
    if tokens.shape[1] != held or held == total:
        return None
    conditions = {name: given[name] for name in frames.conditions if given.get(name) is not None}
    count = next(iter(conditions.values())).shape[1] // frames.each
    part = _Part.of(cuts.first(frames.stream), held, given[frames.until] if frames.until else total, count)
    given[frames.tokens] = part.fill(tokens)
    for name, value in conditions.items():
        given[name] = value[:, part.first * frames.each : part.last * frames.each]
    if frames.until:
        given[frames.until] = part.length
    parts[:] = [part]
    return (), given


@torch.compiler.disable
def _drop(parts: list[_Part | None], _: nn.Module, __: Any, output: Tensor) -> Tensor:
    (part,) = parts
    return output if part is None else part.drop(output)
