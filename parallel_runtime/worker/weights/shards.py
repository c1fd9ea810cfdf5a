"""Weights at rest in parts: of each block every rank of a lane keeps one, and all gather it."""

from __future__ import annotations

from torch import Tensor, nn

from ..engine.exchange import Pending, gather_evenly
from ..engine.mesh import Axis
from .slab import Slab


class Shards:
    """`axis` is the ranks that share a sequence, on a communicator that carries nothing else."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._parts: list[Tensor] = []
        self._before: dict[int, Tensor] = {}

    @property
    def ranks(self) -> int:
        return self._axis.size

    @property
    def device_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def keep(self, slab: Slab, like: Tensor) -> None:
        """This rank's part, on the device of `like`."""
        part = like.new_zeros(slab.size // self._axis.size)
        slab.write(part, first=self._axis.index * part.numel())
        self._parts.append(part)

    def seal(self) -> None:
        """All are kept."""

    def at_rest(self, number: int) -> Tensor | None:
        """No rank has all of it."""
        return None

    def change(self, number: int, module: nn.Module, name: str, slab: Slab) -> None:
        """Another weight for a while."""
        if number not in self._before:
            self._before[number] = self._parts[number]
            self._parts[number] = self._parts[number].clone()
        slab.write(self._parts[number], self._axis.index * self._parts[number].numel(), (module, name))

    def restore(self) -> list[int]:
        """What was kept, again; which were changed."""
        changed = list(self._before)
        for number in changed:
            self._parts[number] = self._before.pop(number)
        return changed

    def fetch(self, number: int, memory: Tensor) -> Pending:
        return gather_evenly(memory, self._parts[number], self._axis)

    def close(self) -> None:
        self._parts.clear()
        self._before.clear()
