"""What a Storage means on this rank: where a store of weights takes them from, parts on all devices or main memory."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...specs import Storage
from ..engine.exchange import gather_into
from ..engine.mesh import Axis
from ..engine.streams import chunk_sizes
from ..ranks import everybodys, neighbours, rank
from .slab import PAGE, Slab
from .store import Arriving, Buffers, Source

log = logging.getLogger(__name__)

FD_BITS = 20


@dataclass(frozen=True, eq=False)
class Place:
    """Where weights are of which only a `share` is on the device at rest, but for `resident` blocks. Other ranks may
    have other numbers of them: `residents` are all that there are."""

    resident: int
    residents: frozenset[int]
    share: float
    source: Callable[[], Source]
    buffers: Buffers


def place(storage: Storage, axis: Axis, device: torch.device, buffers: Buffers) -> Place | None:
    """`axis` is the ranks that a shard's parts are on, of a group of its own; None where weights are whole."""
    residents = frozenset(storage.residents or (storage.resident,))
    if storage.mode == "offload":

        def copy() -> Source:
            return HostCopy(device, neighbours(), rank(), staged=device.type != "cpu")

        return Place(storage.resident_on(rank()), residents, 0.0, copy, buffers)
    if storage.mode == "shard" and axis.size > 1:
        parts = tuple(storage.parts[peer] for peer in axis.ranks) if storage.parts else (1,) * axis.size
        axis = replace(axis, shares=parts)
        share = parts[axis.index] / sum(parts)
        return Place(storage.resident, residents, share, lambda: Shards(axis), buffers)
    return None


class HostCopy:
    """Weights at rest in main memory, once a machine: memory files that its ranks write in turn, and all of them map.

    `ranks` (of the world) are those of this machine, `rank` is this one. `staged`: blocks are copied to where they
    run; on the CPU they run where they are.
    """

    ranks = 1  # that a slab is divided among
    device_bytes = 0

    def __init__(self, device: torch.device, ranks: Sequence[int], rank: int, *, staged: bool) -> None:
        self.staged = staged
        self._peers = list(ranks)
        self._mine = self._peers.index(rank)
        self._file = os.memfd_create("cp-weights", os.MFD_CLOEXEC)
        self._ends = [0] * len(self._peers)
        self._places: list[tuple[int, int, int]] = []
        self._mapped: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def keep(self, slab: Slab, like: Tensor) -> None:
        """One rank of the machine writes it. Raises OSError (ENOSPC) where the memory is not there."""
        writer = len(self._places) % len(self._peers)
        start = self._ends[writer]
        self._ends[writer] += slab.size
        self._places.append((writer, start, slab.size))
        if writer == self._mine and slab.size:
            os.posix_fallocate(self._file, start, slab.size)
            slab.write(torch.frombuffer(mmap.mmap(self._file, slab.size, offset=start), dtype=torch.uint8))

    def seal(self) -> list[Tensor]:
        """All of it is written, by all ranks, and of each slab this rank has all. Collective."""
        files = everybodys(os.getpid() << FD_BITS | self._file)
        for peer, size in zip(self._peers, self._ends, strict=True):
            self._mapped.append(_mapped(files[peer], size))
        if self._stream is not None and not all(map(_locked, self._mapped)):
            log.warning("[CP] the weights in main memory could not be page-locked: copying them will take longer")
        return [self._mapped[writer][start : start + size] for writer, start, size in self._places]

    def first(self, size: int) -> int:
        return 0

    def fetch(self, part: Tensor, memory: Tensor) -> Arriving:
        if self._stream is None:
            memory.copy_(part)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())  # by then nobody reads what was in `memory`
        with torch.cuda.stream(self._stream):
            memory.copy_(part, non_blocking=True)
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            for memory in self._mapped:
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._mapped.clear()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _mapped(file: int, size: int) -> Tensor:
    """The memory file of a process of this machine, by its number for `everybodys`."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    fd = os.open(f"/proc/{file >> FD_BITS}/fd/{file & ((1 << FD_BITS) - 1)}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)


def _locked(memory: Tensor) -> bool:
    """Each process locks the pages for itself."""
    if not memory.numel():
        return True
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


class Shards:
    """Weights at rest in parts: of each block every rank of a lane keeps one, and all gather it.

    `axis` is the ranks that share a sequence, on a communicator that carries nothing else; its shares are of the pages
    that each keeps.
    """

    staged = True

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._parts: list[Tensor] = []

    @property
    def ranks(self) -> int:
        return self._axis.size

    @property
    def device_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def keep(self, slab: Slab, like: Tensor) -> None:
        """This rank's part, on the device of `like`."""
        part = like.new_zeros(self._sizes(slab.size)[self._axis.index])
        slab.write(part, self.first(slab.size))
        self._parts.append(part)

    def seal(self) -> list[Tensor]:
        """All are kept."""
        return list(self._parts)

    def first(self, size: int) -> int:
        return sum(self._sizes(size)[: self._axis.index])

    def fetch(self, part: Tensor, memory: Tensor) -> Arriving:
        return gather_into(memory, part, self._sizes(memory.numel()), self._axis).wait

    def close(self) -> None:
        self._parts.clear()

    def _sizes(self, size: int) -> list[int]:
        """The bytes of so many that each rank keeps."""
        return [pages * PAGE for pages in chunk_sizes(size // PAGE, self._axis.parts)]
