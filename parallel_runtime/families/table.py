"""How a checkpoint's parameter names become diffusers': a table of moves, splits and swaps. Knows no model.

In a row `#` stands for a block's number and `@` for weight or bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Cut = Callable[[Tensor], Sequence[Tensor]]
HOLES = {"#": r"(\d+)", "@": "(weight|bias)"}


class Row(NamedTuple):
    source: re.Pattern[str]
    targets: tuple[str, ...]
    cut: Cut


def move(source: str, target: str) -> Row:
    """The same tensor under another name."""
    return _row(source, (target,), lambda tensor: (tensor,))


def split(source: str, *targets: str, parts: Sequence[int] | None = None) -> Row:
    """Rows of a fused projection, in the proportions `parts` (default: equal). The pieces are views."""
    shares = tuple(parts or [1] * len(targets))

    def cut(tensor: Tensor) -> Sequence[Tensor]:
        if tensor.shape[0] % sum(shares):
            raise ValueError(f"{source} has {tensor.shape[0]} rows, which do not divide as {shares}")
        unit = tensor.shape[0] // sum(shares)
        return tensor.split([share * unit for share in shares])

    return _row(source, targets, cut)


def swap(source: str, target: str) -> Row:
    """The two halves change places: ComfyUI modulates by (shift, scale), diffusers by (scale, shift). A copy."""
    return _row(source, (target,), lambda tensor: (torch.cat(tensor.chunk(2)[::-1]),))


def drop(source: str) -> Row:
    """A marker that carries no weight."""
    return _row(source, (), lambda tensor: ())


class Table:
    """Rows are tried in order. A name that no row knows comes back unchanged, so that the loader can report it."""

    def __init__(self, *rows: Row) -> None:
        self._rows = rows

    def __call__(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        for row in self._rows:
            if match := row.source.fullmatch(name):
                return [
                    (_fill(target, match.groups()), piece)
                    for target, piece in zip(row.targets, row.cut(tensor), strict=True)
                ]
        return [(name, tensor)]


def _row(source: str, targets: tuple[str, ...], cut: Cut) -> Row:
    pattern = "".join(HOLES.get(letter, re.escape(letter)) for letter in source)
    return Row(re.compile(pattern), targets, cut)


def _fill(target: str, found: tuple[str, ...]) -> str:
    """Numbers go to the `#` of a target, weight or bias to its `@`, each in order of appearance."""
    rest = list(found)
    return re.sub("[#@]", lambda _: rest.pop(0), target)
