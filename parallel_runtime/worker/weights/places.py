"""What a Storage means on this rank: which source a store of weights takes them from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...specs import Storage
from ..engine.mesh import Axis
from ..ranks import neighbours, rank
from .buffers import Buffers
from .host_copy import HostCopy
from .shards import Shards
from .store import Source


@dataclass(frozen=True, eq=False)
class Place:
    """Where weights are of which only a `share` is on the device at rest, but for `resident` blocks. `in_main_memory`:
    that is the device itself, and what lies in a file is there."""

    resident: int
    share: float
    source: Callable[[], Source]
    buffers: Buffers
    in_main_memory: bool


def place(storage: Storage, axis: Axis, device: torch.device, buffers: Buffers) -> Place | None:
    """`axis` is the ranks that a shard's parts are on, of a group of its own; None where weights are whole."""
    if storage.mode == "offload":
        staged = device.type != "cpu"

        def copy() -> Source:
            return HostCopy(device, neighbours(), rank(), staged=staged)

        return Place(storage.resident, 0.0, copy, buffers, in_main_memory=not staged)
    if storage.mode == "shard" and axis.size > 1:
        return Place(storage.resident, 1 / axis.size, lambda: Shards(axis), buffers, in_main_memory=False)
    return None
