"""The weights of one block as one flat row of bytes: the plain tensors inside a weight of any format, laid out, and the
same weight rebuilt around other tensors; and where offloaded ones are stored.

That is in main memory, or in parts on the devices of all ranks. Of each block a source stores this rank's part, from
`first_byte` on; `device_bytes` are those of all parts on this device, and `ranks` divides a block's padded size. A
`staged` block is copied before it runs."""

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .comm.collectives import all_gather_int, all_gather_into
from .comm.mesh import MeshDim
from .split.streams import chunk_sizes

log = logging.getLogger(__name__)

Wait = Callable[[], object]  # waits for a fetch

FD_BITS = 20  # of a number that has a pid above it
ALIGNMENT_BYTES = 512  # of every tensor: kernels, and so the bits of a result, are chosen by alignment
CPU_ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class FlatTensor:
    """One plain tensor of a parameter: its offset and size [bytes], and a `template` of it without storage."""

    offset: int
    nbytes: int
    template: Tensor

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.nbytes].view(self.template.dtype).view(self.template.shape)


class FlatBlock:
    """The layout of a block's parameters. `padded_bytes` is a number of pages that `ranks` divides."""

    def __init__(self, block: nn.Module, ranks: int = 1) -> None:
        self._parameters: list[tuple[nn.Module, str, nn.Parameter, list[FlatTensor]]] = []
        self._end = 0
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    tensors = [self._append(plain) for plain in plain_tensors(weight)]
                    empty = rebuild_parameter(weight, [tensor.template for tensor in tensors])
                    self._parameters.append((module, name, empty, tensors))
        self.padded_bytes = -(-self._end // (PAGE_BYTES * ranks)) * PAGE_BYTES * ranks

    @property
    def _tensors(self) -> list[FlatTensor]:
        return [tensor for *_, tensors in self._parameters for tensor in tensors]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the weights, without padding."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def layout(self) -> str:
        """Returns a text that is equal on ranks with equal layouts."""
        return repr([(x.offset, x.nbytes, str(x.template.dtype), x.template.shape) for x in self._tensors])

    def write(self, memory: Tensor, first: int = 0, only: tuple[nn.Module, str] | None = None) -> None:
        """Copies the bytes of the parameters from `first` on into `memory`. `only`: of this parameter alone."""
        last = first + memory.numel()
        for module, name, _, tensors in self._parameters:
            if only not in (None, (module, name)):
                continue
            for tensor, plain in zip(tensors, plain_tensors(getattr(module, name)), strict=True):
                begin, end = max(tensor.offset, first), min(tensor.offset + tensor.nbytes, last)
                if begin < end:
                    raw = plain.contiguous().view(-1).view(memory.dtype)
                    memory[begin - first : end - first].copy_(raw[begin - tensor.offset : end - tensor.offset])

    def dtype_matches(self, module: nn.Module, name: str) -> bool:
        """Returns whether this parameter still has the dtype of the layout."""
        (empty,) = (empty for owner, called, empty, _ in self._parameters if owner is module and called == name)
        return empty.dtype == getattr(module, name).dtype

    def drop_storage(self) -> None:
        """Frees the parameters' memory; until `bind` they have dtype and shape alone."""
        for module, name, empty, _ in self._parameters:
            module._parameters[name] = empty

    def bind(self, memory: Tensor) -> None:
        for module, name, empty, tensors in self._parameters:
            module._parameters[name] = rebuild_parameter(empty, [tensor.view(memory) for tensor in tensors])

    def _append(self, plain: Tensor) -> FlatTensor:
        """Adds a tensor; on the CPU at its old offset in a cache line: a file's weights begin anywhere."""
        line_offset = plain.data_ptr() % CPU_ALIGNMENT_BYTES if plain.device.type == "cpu" else 0
        line_offset = 0 if line_offset % plain.element_size() else line_offset
        # It has the same dtype, device and shape, and one element.
        template = torch.zeros((), dtype=plain.dtype, device=plain.device).expand(plain.shape)
        tensor = FlatTensor(self._end + line_offset, plain.numel() * plain.element_size(), template)
        self._end += -(-(line_offset + tensor.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tensor


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """Returns a quantised weight's codes and scales; the stored bytes of one whose class shows another shape."""
    if hasattr(weight, "__tensor_flatten__"):
        names, _ = weight.__tensor_flatten__()
        return [getattr(weight, name) for name in names]
    return [weight.detach().as_subclass(Tensor)]


def rebuild_parameter(weight: Tensor, parts: list[Tensor]) -> nn.Parameter:
    """Returns a parameter of `weight`'s class, shape and attributes with the plain tensors `parts`."""
    weight_class: Any = type(weight)
    if hasattr(weight, "__tensor_flatten__"):
        names, context = weight.__tensor_flatten__()
        parameter = weight_class.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, weight.shape, None)
        parameter._is_param = True  # nn.Parameter would copy the scales
        return parameter
    if weight_class in (Tensor, nn.Parameter):
        return nn.Parameter(parts[0], requires_grad=False)
    parameter = parts[0].as_subclass(weight_class)
    parameter.__dict__.update({**vars(weight), "_is_param": True})
    return parameter


class HostWeights:
    """Weights in main memory, once a machine: memory files that its ranks write in turn, and all of them map. On the
    CPU blocks run there, and are not `staged`. `ranks` (global) are those of this machine, `rank` is this one; `dim`
    has the ranks that store weights at once, None for all."""

    ranks = 1  # that a block is sharded over
    device_bytes = given_back_bytes = 0

    def __init__(
        self, device: torch.device, ranks: Sequence[int], rank: int, *, staged: bool, dim: MeshDim | None = None
    ) -> None:
        self.staged, self.dim = staged, dim
        self._peers = list(ranks)
        self._local_index = self._peers.index(rank)
        self._file = os.memfd_create("cp-weights", os.MFD_CLOEXEC)
        self._file_bytes = [0] * len(self._peers)
        self._extents: list[tuple[int, int, int]] = []
        self._mapped_files: list[Tensor] = []
        self._locked_files: list[Tensor] = []
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
        """Waits until all ranks have written and mapped, and returns every block's bytes. Collective."""
        files = all_gather_int(os.getpid() << FD_BITS | self._file, self.dim)
        for peer, size in zip(self._peers, self._file_bytes, strict=True):
            self._mapped_files.append(_map_file(files[peer], size))
        all_gather_int(0, self.dim)  # a rank that went on could close its file before a slower one has opened it
        # Page-locked for this process, so that the device copies from it by itself.
        to_lock = [memory for memory in self._mapped_files if memory.numel() and self._stream is not None]
        for memory in to_lock:
            if _succeeds(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0), self._device):
                self._locked_files.append(memory)
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

    def give_back(self, nbytes: int) -> None:
        """Does nothing: these weights take nothing of the device."""

    def bring_back(self) -> None:
        pass

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            for memory in self._locked_files:
                _succeeds(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()), self._device)
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


def _succeeds(result: Any, device: torch.device) -> bool:
    """Returns whether a CUDA call did; of one that failed clears the error, which the next kernel would raise."""
    if int(result) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
    return False


class ShardedWeights:
    """Weights sharded over the ranks of a cp group: each rank stores a part of every block, and all gather it.

    `mesh_dim` has a communicator that transfers nothing else; its `shares` are of the pages that each rank stores."""

    staged = True
    dim = None  # all ranks store weights at once

    def __init__(self, mesh_dim: MeshDim) -> None:
        self._mesh_dim = mesh_dim
        self._parts: list[Tensor] = []
        self._given_back: list[tuple[Tensor, Tensor]] = []  # parts, and what they had, in main memory

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

    @property
    def given_back_bytes(self) -> int:
        return sum(kept.nbytes for _, kept in self._given_back)

    def give_back(self, nbytes: int) -> None:
        """Moves parts of at least so many bytes to main memory, the last blocks' first, until `bring_back`."""
        wanted = self.given_back_bytes + nbytes
        for part in reversed(self._parts[: len(self._parts) - len(self._given_back)]):
            if self.given_back_bytes >= wanted:
                return
            self._given_back.append((part, part.to("cpu", copy=True)))
            part.untyped_storage().resize_(0)  # views of it stay

    def bring_back(self) -> None:
        for part, kept in self._given_back:
            part.untyped_storage().resize_(kept.nbytes)
            part.copy_(kept)
        self._given_back.clear()

    def fetch(self, part: Tensor, memory: Tensor) -> Wait:
        return all_gather_into(memory, part, self._sizes(memory.numel()), self._mesh_dim).wait

    def close(self) -> None:
        self._parts.clear()
        self._given_back.clear()

    def _sizes(self, size: int) -> list[int]:
        """Returns the bytes of a block of `size` bytes that each rank stores."""
        return [pages * PAGE_BYTES for pages in chunk_sizes(size // PAGE_BYTES, self._mesh_dim.parts)]


WeightSource = HostWeights | ShardedWeights
