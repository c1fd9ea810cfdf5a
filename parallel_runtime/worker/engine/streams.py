"""The token streams of the forward in progress: one global length each, seen first where a plan cuts them."""

from __future__ import annotations

from collections.abc import Sequence

from .holdings import Holding, Part
from .sizes import chunk_sizes


class Streams:
    """Lengths of the streams of one forward, and how they are spread over `parts` ranks. Cleared between forwards.

    Streams that are `replicated` every rank holds whole; each still has its own chunk to attend for.
    """

    def __init__(self, parts: int, replicated: frozenset[str] = frozenset()) -> None:
        self.replicated = replicated
        self._parts = parts
        self._lengths: dict[str, int] = {}
        self._spread: dict[tuple[str, ...], tuple[int, ...]] = {}

    def clear(self) -> None:
        self._lengths.clear()
        self._spread.clear()

    def see(self, stream: str, length: int, where: str) -> None:
        """Record the global length of `stream` [tokens]; ValueError if this forward has seen another one."""
        known = self._lengths.setdefault(stream, length)
        if known != length:
            raise ValueError(
                f"{where} has {length} tokens, but stream {stream!r} was cut with {known} earlier in this forward; "
                "tensors that the plan puts into one stream must have one global length"
            )

    def knows(self, stream: str) -> bool:
        """Has it been cut in this forward?"""
        return stream in self._lengths

    def length(self, stream: str) -> int:
        """Global length of `stream`; ValueError before its first cut."""
        if stream not in self._lengths:
            seen = ", ".join(f"{name}={length}" for name, length in self._lengths.items()) or "none"
            raise ValueError(f"stream {stream!r} is used before the plan cut it in this forward (cut so far: {seen})")
        return self._lengths[stream]

    def held(self, names: tuple[str, ...], index: int) -> Holding:
        """What rank `index` holds of `names`."""
        return Holding([Part.of(self.length(name), self._parts, index, name in self.replicated) for name in names])

    def spread(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens that are each rank's own of `names` together, in context order."""
        if names not in self._spread:
            self._spread[names] = _sum_by_rank([chunk_sizes(self.length(name), self._parts) for name in names])
        return self._spread[names]


def _sum_by_rank(chunks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(sizes) for sizes in zip(*chunks, strict=True))
