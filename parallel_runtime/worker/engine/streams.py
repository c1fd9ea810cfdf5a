"""The token streams of the forward in progress: how long they are, and who holds which of their tokens.

Who holds what goes by a global count alone, so that no size is ever sent. What depends only on the lengths, and memory
that every layer wants alike, is kept here until the forward is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import Refused
from .exchange import allocate, allocate_kept
from .mesh import Axis, Parts
from .patches import Patches

KEPT_BYTES = 32 << 20  # of one buffer; where buffers are larger, allocating them is nothing beside filling them

DIVIDED = "_context_parallel"  # the attribute of a network that is cut; what is there has its `streams`

Made = TypeVar("Made")
Whole = Callable[[Tensor, int], Tensor]


@lru_cache(maxsize=4096)
def chunk_sizes(total: int, parts: Parts) -> tuple[int, ...]:
    """Sizes of contiguous chunks of `total` items: of so many parts alike, or in proportion to these shares.

    Each is its quota, rounded down or up: up where most would be lost, the earlier chunk first. So alike ones differ by
    at most one, larger ones first. A chunk is empty where its share is 0, or too small for an item. This is the one
    rule of who holds how much.
    """
    assert total >= 0
    shares = (1,) * parts if isinstance(parts, int) else parts
    whole = sum(shares)
    assert whole > 0
    assert min(shares) >= 0
    sizes = [total * share // whole for share in shares]
    by_loss = sorted(range(len(shares)), key=lambda index: -(total * shares[index] % whole))
    for index in by_loss[: total - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


@lru_cache(maxsize=4096)
def chunk_range(total: int, parts: Parts, index: int) -> tuple[int, int]:
    """(start, size) of chunk `index` among the chunks of `chunk_sizes`."""
    sizes = chunk_sizes(total, parts)
    return sum(sizes[:index]), sizes[index]


@dataclass(frozen=True, kw_only=True)
class Part:
    """`held` tokens of one stream, of which `own` from `start` on are the rank's own: those that it attends for.

    Cut streams are held as the own chunk, replicated ones whole. Where a chunk is empty a stand-in is held, which no
    attention sees and no gather shows: layers of diffusers reshape with -1, and fail on tensors of no elements.
    """

    held: int
    start: int
    own: int
    replica: bool

    def restore(self, own: Tensor, whole: Whole) -> Tensor:
        """What is held again: all ranks' tokens of a replica, and zeros for a stand-in."""
        if self.replica:
            return whole(own, self.held)
        return own if self.held == self.own else own.new_zeros((own.shape[0], self.held, *own.shape[2:]))


@dataclass(frozen=True)
class Holding:
    """What this rank holds of streams that are concatenated."""

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


class Streams:
    """Lengths of the streams of one forward, cut over the ranks of `axis`. Cleared between forwards.

    Streams that are `replicated` every rank holds whole; each still has its own chunk to attend for. Of `patches` the
    ranks share the one whose turn it is.
    """

    def __init__(self, axis: Axis, replicated: frozenset[str] = frozenset(), patches: Patches | None = None) -> None:
        self.replicated = replicated
        self._axis = axis
        self._patches = patches
        self._lengths: dict[str, int] = {}
        self._kept: dict[Hashable, Any] = {}

    def clear(self) -> None:
        self._lengths.clear()
        self._kept.clear()

    def see(self, stream: str, length: int, where: str) -> None:
        """Record the global length of `stream` [tokens]; Refused if this forward has seen another one."""
        known = self._lengths.setdefault(stream, length)
        if known != length:
            raise Refused(
                f"{where} has {length} tokens, but stream {stream!r} was cut with {known} earlier in this forward; "
                "tensors that the plan puts into one stream must have one global length"
            )

    @property
    def lengths(self) -> dict[str, int]:
        """Of all streams that this forward has cut so far, [tokens]."""
        return dict(self._lengths)

    def knows(self, stream: str) -> bool:
        """Has it been cut in this forward?"""
        return stream in self._lengths

    def length(self, stream: str) -> int:
        """Global length of `stream`; Refused before its first cut."""
        if stream not in self._lengths:
            seen = ", ".join(f"{name}={length}" for name, length in self._lengths.items()) or "none"
            raise Refused(f"stream {stream!r} is used before the plan cut it in this forward (cut so far: {seen})")
        return self._lengths[stream]

    def total(self, names: tuple[str, ...]) -> int:
        """Global length of `names` together."""
        return sum(map(self.length, names))

    def sizes(self, stream: str) -> tuple[int, ...]:
        """Each rank's own tokens of `stream`."""
        return chunk_sizes(self._here(stream)[1], self._axis.parts)

    def own(self, stream: str) -> tuple[int, int]:
        """(start, size) of this rank's own chunk of `stream`."""
        return self._of_rank(stream, self._axis.index)

    def _of_rank(self, stream: str, index: int) -> tuple[int, int]:
        first, here = self._here(stream)
        start, size = chunk_range(here, self._axis.parts, index)
        return first + start, size

    def _here(self, stream: str) -> tuple[int, int]:
        """(start, size) of what the ranks have of it together: all, or the patch whose turn it is."""
        length = self.length(stream)
        return (0, length) if self._patches is None else self._patches.part(stream, length)

    def places(self, names: tuple[str, ...], device: torch.device, ranks: Sequence[int] | None = None) -> Tensor:
        """Where the tokens that these ranks, or all, have of `names` are in the whole of these, rank by rank."""
        starts = [self.total(names[:n]) for n in range(len(names))]
        ranges = [
            (before + start, size)
            for index in (range(self._axis.size) if ranks is None else ranks)
            for before, (start, size) in zip(starts, (self._of_rank(name, index) for name in names), strict=True)
        ]
        return torch.cat([torch.arange(start, start + size, device=device) for start, size in ranges])

    def held(self, names: tuple[str, ...]) -> Holding:
        """What this rank holds of `names`."""
        return Holding([self._part(name) for name in names])

    def _part(self, stream: str) -> Part:
        length, (start, own) = self.length(stream), self.own(stream)
        if stream in self.replicated:
            return Part(held=length, start=start, own=own, replica=True)
        return Part(held=max(own, min(length, 1)), start=0, own=own, replica=False)

    def hold(self, whole: Tensor, stream: str, dim: int) -> Tensor:
        """What this rank holds of all of a stream, or the first token where its chunk is empty. A view."""
        if stream in self.replicated:
            return whole
        start, size = self.own(stream)
        return whole.narrow(dim, start, size) if size else whole.narrow(dim, 0, min(whole.shape[dim], 1))

    def spread(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens that are each rank's own of `names` together, in context order."""
        return tuple(map(sum, zip(*map(self.sizes, names), strict=True)))

    def somebody_holds_all(self, names: tuple[str, ...]) -> bool:
        """Does a rank hold as many tokens as there are, of those of `names` that are cut? It cannot tell by a tensor's
        length whether all have cut it: where it matters, all ranks have to do what serves both."""
        cut = tuple(name for name in names if name not in self.replicated)
        held = ([max(own, min(self.length(name), 1)) for own in self.sizes(name)] for name in cut)
        return self.total(cut) in map(sum, zip(*held, strict=True))

    def kept(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` made when this forward first asked for `key`."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    def spare(self, use: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for `use`, which the next layer gets again: nobody may need what it holds by then."""
        key = (use, shape, like.dtype, like.device, torch.is_inference_mode_enabled())
        kept: Tensor | None = self._kept.get(key)
        if kept is None:
            if math.prod(shape) * like.element_size() > KEPT_BYTES:
                return allocate(shape, like)
            kept = self._kept[key] = allocate_kept(shape, like)
        return kept


def streams_of(network: nn.Module) -> Streams | None:
    """The cut streams of the forward in progress; None where this rank holds the whole sequence."""
    found: Streams | None = getattr(getattr(network, DIVIDED, None), "streams", None)
    return found
