"""The token streams of the forward in progress: one global length each, seen first where a plan cuts them.

What depends only on them, and memory that every layer wants alike, is kept here until the forward is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import Refused
from .exchange import allocate, allocate_kept
from .holdings import Holding, Part
from .sizes import chunk_sizes

KEPT_BYTES = 32 << 20  # of one buffer; where buffers are larger, allocating them is nothing beside filling them

DIVIDED = "_context_parallel"  # the attribute of a network that is cut; what is there has its `streams`

Made = TypeVar("Made")


class Streams:
    """Lengths of the streams of one forward, and how they are spread over `parts` ranks. Cleared between forwards.

    Streams that are `replicated` every rank holds whole; each still has its own chunk to attend for.
    """

    def __init__(self, parts: int, replicated: frozenset[str] = frozenset()) -> None:
        self.replicated = replicated
        self._parts = parts
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

    def held(self, names: tuple[str, ...], index: int) -> Holding:
        """What rank `index` holds of `names`."""
        return Holding([Part.of(self.length(name), self._parts, index, name in self.replicated) for name in names])

    def spread(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens that are each rank's own of `names` together, in context order."""
        return _sum_by_rank([chunk_sizes(self.length(name), self._parts) for name in names])

    def kept(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` made when this forward first asked for `key`."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    def spare(self, use: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for `use`, which the next layer gets again: nobody may need what it holds by then."""
        key = (use, shape, like.dtype, like.device, torch.is_inference_mode_enabled())
        if (kept := self._kept.get(key)) is not None:
            return kept  # type: ignore[no-any-return]
        if math.prod(shape) * like.element_size() > KEPT_BYTES:
            return allocate(shape, like)
        self._kept[key] = allocate_kept(shape, like)
        return self._kept[key]  # type: ignore[no-any-return]


def streams_of(network: nn.Module) -> Streams | None:
    """The cut streams of the forward in progress; None where this rank holds the whole sequence."""
    found: Streams | None = getattr(getattr(network, DIVIDED, None), "streams", None)
    return found


def _sum_by_rank(chunks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(sizes) for sizes in zip(*chunks, strict=True))
