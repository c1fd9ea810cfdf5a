"""A WeightPlacement on this rank: weights are fetched from shards on all devices, or from main memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...specs import WeightPlacement
from ..comm.collectives import all_gather_into
from ..comm.mesh import MeshDim
from ..comm.ranks import machine_ranks, rank
from ..comm.votes import all_gather_int
from ..split.streams import chunk_sizes
from .flat_block import PAGE_BYTES, FlatBlock
from .prefetch import Buffers, Wait, WeightSource

log = logging.getLogger(__name__)

FD_BITS = 20


@dataclass(frozen=True, eq=False)
class RankPlacement:
    """How this rank places weights: `resident_blocks` are fully on its device, of all others only `local_fraction`.
    `resident_counts` are the numbers of resident blocks of all ranks."""

    resident_blocks: int
    resident_counts: frozenset[int]
    local_fraction: float
    source: Callable[[], WeightSource]
    buffers: Buffers


def rank_placement(
    placement: WeightPlacement, mesh_dim: MeshDim, device: torch.device, buffers: Buffers
) -> RankPlacement | None:
    """Returns None where all weights are on every device. `mesh_dim`: the ranks of the shards, with a group of its
    own."""
    counts = frozenset(placement.resident_blocks_by_rank or (placement.resident_blocks,))
    if placement.mode == "offload":
        resident, staged = placement.resident_blocks_on(rank()), device.type != "cpu"
        return RankPlacement(
            resident, counts, 0.0, lambda: HostWeights(device, machine_ranks(), rank(), staged=staged), buffers
        )
    if placement.mode == "shard" and mesh_dim.size > 1:
        shares = placement.shard_shares
        parts = tuple(shares[peer] if shares else 1 for peer in mesh_dim.ranks)
        mesh_dim = replace(mesh_dim, shares=parts)
        fraction = parts[mesh_dim.index] / sum(parts)
        return RankPlacement(placement.resident_blocks, counts, fraction, lambda: ShardedWeights(mesh_dim), buffers)
    return None


class HostWeights:
    """Weights in main memory, once a machine: memory files that its ranks write in turn, and all of them map.

    `ranks` (global) are those of this machine, `rank` is this one. `staged`: blocks are copied to the device before
    they run; on the CPU they run in place.
    """

    ranks = 1  # that a block is sharded over
    device_bytes = 0

    def __init__(self, device: torch.device, ranks: Sequence[int], rank: int, *, staged: bool) -> None:
        self.staged = staged
        self._peers = list(ranks)
        self._local_index = self._peers.index(rank)
        self._file = os.memfd_create("cp-weights", os.MFD_CLOEXEC)
        self._file_bytes = [0] * len(self._peers)
        self._extents: list[tuple[int, int, int]] = []
        self._mapped_files: list[Tensor] = []
        self._locked_files: list[Tensor] = []  # page-locked
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def store(self, flat_block: FlatBlock, like: Tensor) -> None:
        """Writes the block, on one rank of the machine. Raises OSError (ENOSPC) where there is not enough memory."""
        writer = len(self._extents) % len(self._peers)
        start = self._file_bytes[writer]
        self._file_bytes[writer] += flat_block.padded_bytes
        self._extents.append((writer, start, flat_block.padded_bytes))
        if writer == self._local_index and flat_block.padded_bytes:
            os.posix_fallocate(self._file, start, flat_block.padded_bytes)
            mapped = mmap.mmap(self._file, flat_block.padded_bytes, offset=start)
            flat_block.write(torch.frombuffer(mapped, dtype=torch.uint8))

    def seal(self) -> list[Tensor]:
        """Waits until all ranks have written, and returns every block's bytes. Collective."""
        files = all_gather_int(os.getpid() << FD_BITS | self._file)
        for peer, size in zip(self._peers, self._file_bytes, strict=True):
            self._mapped_files.append(_map_file(files[peer], size))
        to_lock = [memory for memory in self._mapped_files if memory.numel() and self._stream is not None]
        self._locked_files = [memory for memory in to_lock if _page_lock(memory, self._device)]
        if len(self._locked_files) < len(to_lock):
            log.warning("[CP] the weights in main memory could not be page-locked: copying them will take longer")
        return [self._mapped_files[writer][start : start + size] for writer, start, size in self._extents]

    def first_byte(self, size: int) -> int:
        return 0

    def fetch(self, part: Tensor, memory: Tensor) -> Wait:
        if self._stream is None:
            memory.copy_(part)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())  # no earlier kernel reads `memory` after that
        with torch.cuda.stream(self._stream):
            memory.copy_(part, non_blocking=True)
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            for memory in self._locked_files:
                if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):
                    _discard_error(self._device)
        self._locked_files.clear()
        self._mapped_files.clear()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _map_file(file: int, size: int) -> Tensor:
    """Maps the memory file of a process of this machine, given by pid and descriptor in one number."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    fd = os.open(f"/proc/{file >> FD_BITS}/fd/{file & ((1 << FD_BITS) - 1)}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)


def _page_lock(memory: Tensor, device: torch.device) -> bool:
    """Page-locks `memory` for this process, so that the device copies from it by itself; False where CUDA cannot."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    _discard_error(device)
    return False


def _discard_error(device: torch.device) -> None:
    """Clears the error of a failed CUDA call, which PyTorch raises after the next kernel: launches a dummy kernel."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


class ShardedWeights:
    """Weights sharded over the ranks of a cp group: each rank stores a part of every block, and all gather it.

    `mesh_dim` has a communicator that transfers nothing else; its `shares` are of the pages that each rank stores.
    """

    staged = True

    def __init__(self, mesh_dim: MeshDim) -> None:
        self._mesh_dim = mesh_dim
        self._parts: list[Tensor] = []

    @property
    def ranks(self) -> int:
        return self._mesh_dim.size

    @property
    def device_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def store(self, flat_block: FlatBlock, like: Tensor) -> None:
        """Stores this rank's part on the device of `like`."""
        part = like.new_zeros(self._sizes(flat_block.padded_bytes)[self._mesh_dim.index])
        flat_block.write(part, self.first_byte(flat_block.padded_bytes))
        self._parts.append(part)

    def seal(self) -> list[Tensor]:
        """Returns this rank's part of each block."""
        return list(self._parts)

    def first_byte(self, size: int) -> int:
        return sum(self._sizes(size)[: self._mesh_dim.index])

    def fetch(self, part: Tensor, memory: Tensor) -> Wait:
        return all_gather_into(memory, part, self._sizes(memory.numel()), self._mesh_dim).wait

    def close(self) -> None:
        self._parts.clear()

    def _sizes(self, size: int) -> list[int]:
        """Returns the bytes of a block of `size` bytes that each rank stores."""
        return [pages * PAGE_BYTES for pages in chunk_sizes(size // PAGE_BYTES, self._mesh_dim.parts)]
