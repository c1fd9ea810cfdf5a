"""A plan's words at work on the values of one forward: this rank's part of them, and whole ones again.

Knows no module and no attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import Refused
from ...plan import Along, Count, Index, Names, Plan, Slices, Tokens, Whole, Word
from .exchange import gather
from .mesh import Axis
from .patches import Passed, Patches
from .streams import Streams


class Cuts:
    """Cuts and joins for the ranks of `axis`. Its `streams` live for one forward, as what it remembers does: for one
    turn of one where there are `patches`."""

    def __init__(self, plan: Plan, axis: Axis, patches: Patches | None = None) -> None:
        self.streams = Streams(axis, plan.replicated, patches)
        self._patches = patches
        self._unjoined = False  # are there patches that have not had their turn?
        self._replicated = plan.replicated
        self._axis = axis
        self._shapes: dict[Names, torch.Size] = {}  # of tokens that came in several dims
        self._made: dict[str, tuple[Any, Any]] = {}  # where: what came last, what became of it
        self._held: set[str] = set()
        self._came_cut: dict[Names, bool] = {}  # to the first block of a stack
        self.whole_between = False  # are tokens made whole after each block of this forward?
        self.patched_inside = False  # does a patch run inside its blocks?

    def clear(self) -> None:
        self.streams.clear()
        for state in (self._shapes, self._made, self._held, self._came_cut):
            state.clear()
        self.whole_between = self.patched_inside = self._unjoined = False

    def begin_again(self) -> None:
        """The same forward from its beginning, with other tokens."""
        of_forward = self.whole_between, self.patched_inside
        self.clear()
        self.whole_between, self.patched_inside = of_forward

    def holds(self, stream: str) -> bool:
        """Do the network's own variables hold this stream cut at this moment?"""
        return stream in self._held

    def holds_any(self) -> bool:
        return bool(self._held)

    def held(self, streams: Names) -> int:
        """How many tokens of these streams this rank holds."""
        return self.streams.held(streams).size

    def total(self, streams: Names) -> int:
        """How many tokens there are of these streams."""
        return self.streams.total(streams)

    def first(self, stream: str) -> int:
        """Which of a stream's tokens is the first that this rank holds."""
        start, size = self.streams.own(stream)
        return start if size else 0

    def cut(self, value: Any, word: Word, where: str) -> Any:
        """What becomes of an argument; `where` names it."""
        if value is None or word is None:
            return value
        if isinstance(word, list):
            return self.cut(value, self.fitting(value, word, where), where)
        if isinstance(word, tuple):
            return type(value)(
                [self.cut(v, w, f"{where}[{n}]") for n, (v, w) in enumerate(zip(value, word, strict=True))]
            )
        if isinstance(word, Tokens):
            return self._tokens(value, word, where)
        if isinstance(word, Whole):
            return self.join(value, word.streams, word.dim, where)
        if isinstance(word, Count | Index | Slices):
            return self._numbers(value, word, where)
        return self._accompanying(value, word, where)

    def _numbers(self, value: Any, word: Count | Index | Slices, where: str) -> Any:
        if isinstance(word, Count):
            self._see_rest(word.streams, value.shape[word.dim] if isinstance(value, Tensor) else value, where)
            return value
        return self._index(value, word) if isinstance(word, Index) else [self._range(part, word) for part in value]

    def _accompanying(self, value: Any, word: Any, where: str) -> Any:
        """Cut once for all blocks that are given the same."""
        if self._patches is not None and isinstance(word, Along) and "mask" in where:
            raise Refused(f"{where} would be of one patch's tokens, which attend to all; set patches to 1")
        last, made = self._made.get(where, (None, None))
        if last is not value:
            made = self._along(value, word, where) if isinstance(word, Along) else word(value, self._cutter(where))
            self._made[where] = value, made
        return made

    def _cutter(self, where: str) -> Any:
        return lambda value, word: self.cut(value, word, f"{where} inside")

    def fitting(self, value: Any, words: list[Any], where: str) -> Any:
        """The word whose streams have as many tokens as `value` has, whole or held."""
        tensor = value if isinstance(value, Tensor) else value[0]
        for word in words:
            if tensor.shape[word.dim] in (self.total(word.streams), self.held(word.streams)):
                return word
        raise _misfit(where, tensor.shape[words[0].dim], words[0].streams, str(self.total(words[0].streams)))

    def _see_rest(self, streams: Names, length: int, where: str) -> None:
        unknown = [stream for stream in streams if not self.streams.knows(stream)] or [streams[-1]]
        rest = length - self.total(tuple(stream for stream in streams if stream != unknown[0]))
        self.streams.see(unknown[0], rest, where)

    def _tokens(self, value: Tensor, word: Tokens, where: str) -> Tensor:
        shape = value.shape[word.dim : word.dim + word.flat]
        (stream, *others) = word.streams
        if word.again and stream not in self._held:
            self.begin_again()
        if not others and not self.streams.knows(stream):
            self._shapes[word.streams] = shape
            self.streams.see(stream, shape.numel(), where)
        total, held = self.total(word.streams), self.held(word.streams)
        self._held.update(word.streams)
        cut = shape.numel() == held and total != held
        self._came_cut.setdefault(word.streams, cut)
        if cut:
            return value
        if shape.numel() != total:
            raise _misfit(where, shape.numel(), word.streams, f"{total} (whole) or {held} (this rank's)")
        rest = value.shape[word.dim + word.flat :]
        rows = value.reshape(*value.shape[: word.dim], total, *(1,) * (word.flat - 1), *rest)
        own = self._own(rows, word.streams, word.dim)
        if others or stream in self._replicated:
            return own
        return own.clone(memory_format=torch.contiguous_format)  # blocks write into their input

    def _along(self, value: Any, word: Along, where: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([self._along(item, word, where) for item in value])
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise Refused(
                f"{where} is a {type(value).__name__}, which cannot be cut; set ring and Ulysses degrees to 1"
            )
        if word.ndim not in (None, value.ndim) or value.shape[word.dim] == 1:
            return value
        total, length = self.total(word.streams), value.shape[word.dim]
        if word.per and length < total:
            value = value.repeat_interleave(-(-total // length), word.dim).narrow(word.dim, 0, total)
        elif word.at_end and length < total:
            before = value.narrow(word.dim, 0, 1).repeat_interleave(total - length, word.dim)
            behind = self._position(total - length, word.streams)
            own = self._own(torch.cat([before, value], word.dim), word.streams, word.dim)
            return own.narrow(word.dim, behind, own.shape[word.dim] - behind).contiguous()
        elif length != total:
            raise _misfit(where, length, word.streams, str(total))
        return self._own(value, word.streams, word.dim).contiguous()

    def _own(self, value: Tensor, streams: Names, dim: int) -> Tensor:
        parts = value.split([self.streams.length(stream) for stream in streams], dim)
        own = [self.streams.hold(part, stream, dim) for part, stream in zip(parts, streams, strict=True)]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def _index(self, at: int, word: Index) -> int:
        streams = (word.stream,)
        if word.to_end:
            return self.held(streams) - self._position(self.total(streams) - at, streams)
        return self._position(at, streams)

    def _range(self, part: Any, word: Slices) -> tuple[Any, ...]:
        held = self.held(word.after)
        counted = self.total(word.after) if self.whole_between else held  # by the network's own code, in its variables
        start, end, *rest = part
        own = [self._position(at - counted, word.streams, held) if at else at for at in (start, end)]
        places, mine = _slice_after(counted, start, end), _slice_after(held, *own)
        return (*own, *(self._said_of(item, word.streams, places, mine) for item in rest))

    def _said_of(self, item: Any, streams: Names, places: slice, mine: slice) -> Any:
        """What is said of each position of a range, for those that are held."""
        if not isinstance(item, Tensor):
            return item
        whole = item.new_zeros(self.total(streams), *item.shape[1:])
        whole[places] = item
        return self._own(whole, streams, 0)[mine]

    def _position(self, at: int, streams: Names, own: int = 0) -> int:
        """Where a position of the whole streams is in what is held of them, behind `own` tokens."""
        for stream in streams:
            length, held = self.streams.length(stream), self.held((stream,))
            start = 0 if stream in self._replicated else self.streams.own(stream)[0]
            own += min(max(min(at, length) - start, 0), held)
            at = max(at - length, 0)
        return own

    def prefix(self, value: Tensor, stream: str) -> Tensor:
        """This rank's part of [B, tokens, C] that goes with the first tokens of a stream, maybe with all of them."""
        length = self.streams.length(stream)
        if value.shape[1] > length:
            raise _misfit("a residual", value.shape[1], (stream,), str(length))
        if value.shape[1] == length or stream in self._replicated:
            return self._own(value, (stream,), 1)
        start, size = self.streams.own(stream)
        return value[:, start : start + size]

    def join(self, value: Any, streams: Names, dim: int, where: str) -> Any:
        """Whole streams of this rank's part of them; whole ones stay."""
        if value is None:
            return None
        self._held.difference_update(streams)
        total, held, shape = self.total(streams), self.held(streams), self._shapes.get(streams, ())
        flat = max(1, len(shape))
        found = value.shape[dim:][:flat]
        if found[0] != held or (flat > 1 and found == shape and total != held):
            if found.numel() != total:
                raise _misfit(where, found.numel(), streams, f"{total} (whole) or {held} (this rank's)")
            if not self.streams.somebody_holds_all(streams):
                return value
            rows = value.reshape(*value.shape[:dim], total, *(1,) * (flat - 1), *value.shape[dim + flat :])
            value = self._own(rows, streams, dim)
        elif self._came_cut.get(streams) and not self.whole_between:
            raise Refused(
                f"{where} would be whole, but its blocks were given a part; set ring and Ulysses degrees to 1"
            )
        parts = value.split([self.held((stream,)) for stream in streams], dim)
        gathered = [self._gathered(part, stream, dim, where) for part, stream in zip(parts, streams, strict=True)]
        known = [part for part in gathered if part is not None]
        if len(known) < len(gathered):
            self._unjoined = True
            return value
        joined = torch.cat(known, dim)
        return (
            joined.reshape(*joined.shape[:dim], *shape, *joined.shape[dim + len(shape) :]) if len(shape) > 1 else joined
        )

    def leave(self) -> None:
        """Raises Passed where what was to be made whole waits for the other patches."""
        if self._unjoined:
            raise Passed

    def _gathered(self, part: Tensor, stream: str, dim: int, where: str) -> Tensor | None:
        """All of a stream, of this rank's part of it; None where other patches have not had their turn."""
        if stream not in self._replicated:
            sizes = self.streams.sizes(stream)
            own = part.narrow(dim, 0, sizes[self._axis.index]).movedim(dim, 0)
            part = gather(own, sizes, self._axis).wait()[0].movedim(0, dim)
        return part if self._patches is None else self._patches.joined((where, stream), part, dim)


class Residuals(list[Any]):
    """A ControlNet's residuals of the stream `main`, cut when they are asked for if the stream is then."""

    def __init__(self, whole: list[Any], cuts: Cuts, main: str) -> None:
        super().__init__(whole)
        self._cuts = cuts
        self._main = main

    def __getitem__(self, index: Any) -> Any:
        return self._cut(super().__getitem__(index))

    def __iter__(self) -> Iterator[Any]:
        return map(self._cut, super().__iter__())

    def pop(self, index: Any = -1) -> Any:
        return self._cut(super().pop(index))

    def _cut(self, residual: Any) -> Any:
        if not isinstance(residual, Tensor) or not self._cuts.holds(self._main):
            return residual
        return self._cuts.prefix(residual, self._main)


def _slice_after(before: int, start: int | None, end: int | None) -> slice:
    return slice(*(at - before if at else at for at in (start, end)))


def _misfit(where: str, found: int, streams: Names, expected: str) -> Refused:
    return Refused(
        f"{where} has {found} tokens, but {'+'.join(streams)} has {expected}; this ComfyUI or this input needs "
        "another plan: set ring and Ulysses degrees to 1"
    )
