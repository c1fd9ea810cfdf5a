"""Memory that blocks' weights are fetched into: a few storages of a device, which all of its models use in turn."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """Storages that grow and are given back while views of them stay what they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def memory(self, number: int, size: int) -> Tensor:
        """The first `size` bytes of storage `number`."""
        storage = self._storages.setdefault(number, torch.UntypedStorage(0, device=self._device))
        if storage.nbytes() < size:
            storage.resize_(0)  # nothing worth copying
            storage.resize_(size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))

    def give_back(self) -> None:
        """Until `memory` is asked for again, views of it must not be read."""
        for storage in self._storages.values():
            storage.resize_(0)
