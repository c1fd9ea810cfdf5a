"""The weights of one block as one row of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from .pieces import around, hollow, pieces

LINE = 512  # every piece has lines of its own: kernels are chosen by alignment, and so are the bits of a result
CPU_LINE = 64
PAGE = 4096


@dataclass(frozen=True, eq=False)
class Place:
    """One plain tensor of a parameter: where it begins, how many bytes it has, and what it looks like."""

    start: int
    size: int
    like: Tensor

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + self.size].view(self.like.dtype).view(self.like.shape)


class Slab:
    """Laid out by the block's parameters as they are when it is made; `size` is that of pages that `ranks` divide."""

    def __init__(self, block: nn.Module, ranks: int = 1) -> None:
        self._owners: list[tuple[nn.Module, str, Tensor, list[Place]]] = []
        self._end = 0
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    places = [self._place(piece) for piece in pieces(weight)]
                    self._owners.append((module, name, weight, places))
        self.size = -(-self._end // (PAGE * ranks)) * PAGE * ranks

    @property
    def nbytes(self) -> int:
        """Of the weights themselves."""
        return sum(place.size for place in self._places())

    @property
    def layout(self) -> str:
        """The same on ranks that lay out the same."""
        said = [(place.start, place.size, str(place.like.dtype), place.like.shape) for place in self._places()]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def write(self, memory: Tensor, first: int = 0, only: tuple[nn.Module, str] | None = None) -> None:
        """The bytes of the parameters from `first` on, as many as `memory` has. `only`: of this one."""
        last = first + memory.numel()
        for module, name, _, places in self._owners:
            if only not in (None, (module, name)):
                continue
            for place, piece in zip(places, pieces(getattr(module, name)), strict=True):
                begin, end = max(place.start, first), min(place.start + place.size, last)
                if begin < end:
                    raw = piece.contiguous().view(-1).view(memory.dtype)
                    memory[begin - first : end - first].copy_(raw[begin - place.start : end - place.start])

    def empty(self) -> None:
        """Parameters that look as before, without memory, until `bind`."""
        for index, (module, name, weight, places) in enumerate(self._owners):
            places = [Place(place.start, place.size, hollow(place.like)) for place in places]
            shell = around(weight, [place.like for place in places])
            module._parameters[name] = shell
            self._owners[index] = (module, name, shell, places)

    def bind(self, memory: Tensor) -> None:
        """Parameters that are views of `memory`, whatever will be in it."""
        for module, name, weight, places in self._owners:
            module._parameters[name] = around(weight, [place.view(memory) for place in places])

    def _places(self) -> Iterator[Place]:
        return (place for *_, places in self._owners for place in places)

    def _place(self, piece: Tensor) -> Place:
        """On the CPU as far into a line as it was: there a file's weights begin anywhere."""
        within = piece.data_ptr() % CPU_LINE if piece.device.type == "cpu" else 0
        within = 0 if within % piece.element_size() else within
        place = Place(self._end + within, piece.numel() * piece.element_size(), piece)
        self._end += -(-(within + place.size) // LINE) * LINE
        return place
