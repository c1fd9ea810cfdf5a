"""The tokens of an evaluation in patches, which follow one another through the stages of a pipeline (PipeFusion).

A patch attends to the keys and values of all tokens: those of this evaluation for the patches that have passed, those
of the one before for the others. The text goes with the first patch. A branch's first evaluation goes through whole,
and is exact. Knows no network, no plan and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import Refused


class Passed(Exception):
    """All that the patch whose turn it is needs of its network has run; the last one goes on."""


@dataclass(eq=False)
class _Branch:
    """What is kept of one of a step's evaluations until the next step: how long its streams are, and keys and values
    [B, all tokens, heads, head size] of each attention, in the streams' order."""

    lengths: dict[str, int] = field(default_factory=dict)
    kept: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Patches:
    """`count` patches of a network whose latent is the stream `main`. While `exact` is set evaluations are, and only
    note keys and values. `begins` are called before each of a forward's turns."""

    def __init__(self, count: int, main: str) -> None:
        self.exact = False
        self.begins: list[Callable[[], None]] = []
        self._count = count
        self._main = main
        self._branches: dict[Hashable, _Branch] = {}
        self._asked: list[Hashable] | None = None  # of the evaluations that are in flight
        self._now = _Branch()
        self._turn: int | None = None  # whose it is; None: all tokens are there at once
        self._sizes: dict[str, tuple[int, ...]] = {}  # of each patch, of each stream
        self._joining: dict[Hashable, list[Tensor]] = {}
        self._attention: tuple[Hashable, int] = (None, 0)  # the block that runs, and how many of its attentions have

    @property
    def whole(self) -> bool:
        """Are all tokens there at once?"""
        return self._turn is None

    @property
    def kept_bytes(self) -> int:
        tensors = (tensor for branch in self._branches.values() for both in branch.kept.values() for tensor in both)
        return sum(tensor.nbytes for tensor in tensors)

    def forget(self) -> None:
        """A run begins or ends: no keys of another."""
        self.exact = False
        self._branches.clear()
        self._now = _Branch()
        self._rest()

    def _rest(self) -> None:
        self._turn, self._attention = None, (None, 0)
        self._joining.clear()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """The evaluations in here are of one step: told apart by their order too. What the step before had and this one
        has not is forgotten."""
        self._asked = []
        try:
            yield
        finally:
            asked, self._asked = self._asked, None
            if asked:
                self._branches = {key: branch for key, branch in self._branches.items() if key in asked}

    def turns(self, key: Hashable, lengths: Callable[[], Mapping[str, int]]) -> Iterator[None]:
        """One evaluation of the branch that is known by `key`: a turn for each patch, or one for all tokens.
        `lengths` are those of the streams, asked when all is done."""
        place = (0 if self._asked is None else len(self._asked), key)
        if self._asked is not None:
            self._asked.append(place)
        before = self._branches.pop(place, None)
        exact = self.exact or before is None
        self._now = _Branch() if exact or before is None else before
        self._sizes = {} if exact else sizes_of(self._now.lengths, self._main, self._count)
        for turn in [None] if exact else range(self._count):
            self._rest_between(turn)
            yield
        if exact:
            self._now.lengths = dict(lengths())
            sizes_of(self._now.lengths, self._main, self._count)
        self._branches[place] = self._now
        self._rest()

    def _rest_between(self, turn: int | None) -> None:
        self._turn, self._attention = turn, (None, 0)
        if not turn:
            self._joining.clear()
        for begin in self.begins:
            begin()

    def part(self, stream: str, length: int) -> tuple[int, int]:
        """(start, size) of the tokens of `stream` whose turn it is, of so many."""
        if self._turn is None:
            return 0, length
        if self._now.lengths.get(stream) != length:
            raise Refused(
                f"{stream} has {length} tokens, and in the step before it had {self._now.lengths.get(stream, 0)}: no "
                "keys are kept for it; set patches to 1"
            )
        sizes = self._sizes[stream]
        return sum(sizes[: self._turn]), sizes[self._turn]

    @torch.compiler.disable
    def enter(self, block: Hashable, _: object = None) -> None:
        """The attentions that follow are this block's, whose hook this is."""
        self._attention = (block, 0)

    def attended(self, key: Tensor, value: Tensor, places: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, tokens, heads, head size] of the tokens at these places of `total`; what is attended to:
        they are all there is, or those of all tokens as they are known now."""
        block, number = self._attention
        self._attention = (block, number + 1)
        if self._turn is None:
            self._now.kept[self._attention] = _placed(key, places, total), _placed(value, places, total)
            return key, value
        keys, values = self._now.kept[self._attention]
        return keys.index_copy_(1, places, key), values.index_copy_(1, places, value)

    def joined(self, where: Hashable, part: Tensor, dim: int) -> Tensor | None:
        """All tokens of `part`, this turn's; None where others have not had theirs."""
        if self._turn is None:
            return part
        parts = self._joining.setdefault(where, [])
        parts.append(part)
        if self._turn < self._count - 1:
            return None
        if len(parts) != self._count:
            raise Refused(f"of {where} only {len(parts)} of {self._count} patches came; set patches to 1")
        return torch.cat(parts, dim)


def _placed(tensor: Tensor, places: Tensor, total: int) -> Tensor:
    """In memory of its own, head by head: what is given may be a view of much more."""
    batch, _, heads, size = tensor.shape
    whole = tensor.new_empty(batch, heads, total, size).transpose(1, 2)
    return whole.index_copy_(1, places, tensor)


def sizes_of(lengths: Mapping[str, int], main: str, count: int) -> dict[str, tuple[int, ...]]:
    """Tokens of each of `count` patches, of streams of these lengths: all but `main` go with the first, which has as
    many less of that, but one."""
    beside, length = sum(lengths.values()) - lengths[main], lengths[main]
    if length < count:
        raise Refused(f"patches is {count}, and this latent makes {length} tokens; set patches to {length} or fewer")
    first = min(max(1, -(-(beside + length) // count) - beside), length - count + 1)
    base, more = divmod(length - first, count - 1)
    rest = [base + 1] * more + [base] * (count - 1 - more)
    return {name: (first, *rest) if name == main else (own, *[0] * (count - 1)) for name, own in lengths.items()}
