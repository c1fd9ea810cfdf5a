"""Weights at rest in main memory, once a machine: memory files that its ranks write in turn, and all of them map."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ranks import everybodys
from .slab import Slab

log = logging.getLogger(__name__)

FD_BITS = 20


@dataclass(frozen=True, eq=False)
class Copying:
    """A copy to the device under way."""

    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """What is computed from here on finds it there."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)


class HostCopy:
    """`ranks` (of the world) are those of this machine, `rank` is this one. `staged`: blocks are copied to where they
    run; on the CPU they run where they are."""

    ranks = 1  # that a slab is divided among
    device_bytes = 0

    def __init__(self, device: torch.device, ranks: Sequence[int], rank: int, *, staged: bool) -> None:
        self._staged = staged
        self._peers = list(ranks)
        self._mine = self._peers.index(rank)
        self._file = os.memfd_create("cp-weights", os.MFD_CLOEXEC)
        self._ends = [0] * len(self._peers)
        self._places: list[tuple[int, int, int]] = []
        self._mapped: list[Tensor] = []
        self._own: dict[int, Tensor] = {}
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

    def seal(self) -> None:
        """All of it is written, by all ranks. Collective."""
        files = everybodys(os.getpid() << FD_BITS | self._file)
        for peer, size in zip(self._peers, self._ends, strict=True):
            self._mapped.append(_mapped(files[peer], size))
        if self._stream is not None and not all(map(_locked, self._mapped)):
            log.warning("[CP] the weights in main memory could not be page-locked: copying them will take longer")

    def at_rest(self, number: int) -> Tensor | None:
        """What need not be fetched: a device that is main memory itself has it already."""
        return None if self._staged else self._bytes(number)

    def change(self, number: int, module: nn.Module, name: str, slab: Slab) -> None:
        """Another weight for a while: for this rank, since those of other lanes may have others."""
        if number not in self._own:
            self._own[number] = self._bytes(number).clone()
        slab.write(self._own[number], 0, (module, name))

    def restore(self) -> list[int]:
        """What was kept, again; which were changed."""
        changed = list(self._own)
        self._own.clear()
        return changed

    def fetch(self, number: int, memory: Tensor) -> Copying:
        if self._stream is None:
            memory.copy_(self._bytes(number))
            return Copying()
        self._stream.wait_stream(torch.cuda.current_stream())  # by then nobody reads what was in `memory`
        with torch.cuda.stream(self._stream):
            memory.copy_(self._bytes(number), non_blocking=True)
            return Copying(self._stream.record_event())

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            for memory in self._mapped:
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._mapped.clear()
        self._own.clear()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _bytes(self, number: int) -> Tensor:
        if number in self._own:
            return self._own[number]
        writer, start, size = self._places[number]
        return self._mapped[writer][start : start + size]


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
