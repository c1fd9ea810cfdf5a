"""The engine's collectives: all-to-all, all-gather and ring send-receive, for chunks of unequal size; and tensors
as they travel in float8.

Every size is known to every rank beforehand. Works on NCCL and on gloo, which has no uneven all-gather and moves only
CPU tensors: with gloo, tensors on a GPU are staged through the CPU (`MeshDim.comm_device`).

In float8 tensors have half of the bytes of bfloat16, and are not exact. Each head of a token has a scale of its own,
which lies behind its numbers: whatever cuts, sends or joins tokens and heads takes it along. Two ranks that are sent
the same bytes compute the same.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import GroupState, MeshDim

empty = torch.empty  # tests put functions here that fill with NaN
zeros = torch.zeros


def allocate(shape: Sequence[int], like: Tensor, device: torch.device | None = None) -> Tensor:
    """Returns uninitialised memory of the dtype and device of `like`. All buffers of the engine come from here or
    from `allocate_scratch`."""
    return empty(tuple(shape), dtype=like.dtype, device=device or like.device)


def allocate_scratch(shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns zeros of the dtype and device of `like`, for buffers that many layers reuse. Zeros, because a test group
    that delivers nothing would otherwise time kernels on subnormal numbers."""
    return zeros(tuple(shape), dtype=like.dtype, device=like.device)


@dataclass(frozen=True, eq=False)
class Pending:
    """A transfer under way. Its buffers may not be touched before `wait`, which returns what was received.

    The collective writes `recv_buffers`; `wait` copies them to `outputs` where they differ. `group_state` counts the
    seconds that this process waited. NCCL waits on the device instead, which `comm_timer` measures if it is set.
    """

    works: Sequence[dist.Work]
    recv_buffers: Sequence[Tensor]
    outputs: list[Tensor]
    group_state: GroupState

    def wait(self) -> list[Tensor]:
        state = self.group_state
        if all(tensor.device.type == "cpu" for tensor in self.recv_buffers):
            start = time.monotonic()
            self._wait()
            state.waited_seconds = (state.waited_seconds or 0.0) + time.monotonic() - start
        elif state.comm_timer is not None:
            state.comm_timer.time_wait(self._wait)
        else:
            self._wait()
        for arrived, tensor in zip(self.recv_buffers, self.outputs, strict=True):
            if arrived is not tensor:
                tensor.copy_(arrived)
        return self.outputs

    def _wait(self) -> None:
        for work in self.works:
            work.wait()


def all_to_all(
    send: Tensor, outputs: Tensor, send_counts: list[int] | None, recv_counts: list[int] | None, mesh_dim: MeshDim
) -> Pending:
    """Starts an all-to-all of flat tensors: `send_counts[i]` elements go to rank i, `recv_counts[i]` come back (None:
    even)."""
    buffer = _comm_buffer(outputs, mesh_dim)
    options: Any = {"group": mesh_dim.group, "async_op": True}
    work = dist.all_to_all_single(buffer, _to_comm_device(send, mesh_dim), recv_counts, send_counts, **options)
    return Pending([work], [buffer], [outputs], mesh_dim.group_state)


def all_gather_v(chunk: Tensor, sizes: Sequence[int], mesh_dim: MeshDim) -> Pending:
    """Starts an all-gather along dim 0: `chunk` [sizes[index], ...] of every rank makes [sum(sizes), ...], in rank
    order.

    Point to point, straight into place: nothing is padded, and on gloo it is faster than its all-gather.
    """
    output = allocate((sum(sizes), *chunk.shape[1:]), chunk)
    return _all_gather_p2p(output, chunk.contiguous(), range(mesh_dim.size), sizes, mesh_dim)


def all_gather_others(chunk: Tensor, sizes: Sequence[int], mesh_dim: MeshDim) -> Pending:
    """Starts an all-gather of the other ranks' chunks, starting after this rank: [sum of their sizes, ...]."""
    others = allocate((sum(sizes) - sizes[mesh_dim.index], *chunk.shape[1:]), chunk)
    return _all_gather_p2p(others, chunk.contiguous(), mesh_dim.other_ranks, sizes, mesh_dim)


def all_gather_into(output: Tensor, chunk: Tensor, sizes: Sequence[int], mesh_dim: MeshDim) -> Pending:
    """Starts an all-gather of flat chunks [sizes[index]] into `output`, in rank order."""
    if output.device.type == "cpu" or mesh_dim.comm_device is not None or len(set(sizes)) > 1:
        return _all_gather_p2p(output, chunk, range(mesh_dim.size), sizes, mesh_dim)
    work = dist.all_gather_into_tensor(output, chunk, group=mesh_dim.group, async_op=True)
    return Pending([work], [output], [output], mesh_dim.group_state)


def _all_gather_p2p(
    output: Tensor, chunk: Tensor, peers: Sequence[int], sizes: Sequence[int], mesh_dim: MeshDim
) -> Pending:
    """Gathers the chunks of `peers` in this order. Each rank sends to another peer first, so links are not shared."""
    buffer, to_send, others = _comm_buffer(output, mesh_dim), _to_comm_device(chunk, mesh_dim), mesh_dim.other_ranks
    buffers = dict(zip(peers, buffer.split([sizes[peer] for peer in peers]), strict=True))
    if mesh_dim.index in buffers:
        buffers[mesh_dim.index].copy_(to_send)
    operations = [_p2p(dist.isend, to_send, peer, mesh_dim) for peer in others]
    operations += [_p2p(dist.irecv, buffers[peer], peer, mesh_dim) for peer in reversed(others)]
    return Pending(_start(operations), [buffer], [output], mesh_dim.group_state)


def ring_send_recv(block: Tensor, recv_buffer: Tensor, mesh_dim: MeshDim) -> Pending:
    """Sends `block` to the next rank of a ring while the previous one's arrives in `recv_buffer`."""
    after, before = (mesh_dim.index + 1) % mesh_dim.size, (mesh_dim.index - 1) % mesh_dim.size
    return send_recv({after: block}, {before: recv_buffer}, mesh_dim)


def send_recv(send_tensors: Mapping[int, Tensor], recv_buffers: Mapping[int, Tensor], mesh_dim: MeshDim) -> Pending:
    """Sends `send_tensors[i]` to rank i of `mesh_dim`, while its tensor arrives in `recv_buffers[i]`; every rank knows
    all sizes beforehand. Returns the buffers, in their order."""
    buffers = [_comm_buffer(tensor, mesh_dim) for tensor in recv_buffers.values()]
    operations = [
        _p2p(dist.isend, _to_comm_device(tensor.contiguous(), mesh_dim), peer, mesh_dim)
        for peer, tensor in send_tensors.items()
    ]
    operations += [_p2p(dist.irecv, buffer, peer, mesh_dim) for peer, buffer in zip(recv_buffers, buffers, strict=True)]
    return Pending(_start(operations), buffers, list(recv_buffers.values()), mesh_dim.group_state)


def _to_comm_device(tensor: Tensor, mesh_dim: MeshDim) -> Tensor:
    return tensor if mesh_dim.comm_device is None else tensor.to(mesh_dim.comm_device)


def _comm_buffer(tensor: Tensor, mesh_dim: MeshDim) -> Tensor:
    """Returns the buffer that the collective writes: `tensor`, or one of its shape on `comm_device`."""
    return tensor if mesh_dim.comm_device is None else allocate(tensor.shape, tensor, mesh_dim.comm_device)


def _p2p(operation: Callable[..., Any], tensor: Tensor, peer: int, mesh_dim: MeshDim) -> dist.P2POp:
    return dist.P2POp(operation, tensor, mesh_dim.ranks[peer], mesh_dim.group)


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Starts the operations. Empty tensors are left out, on both ends."""
    operations = [operation for operation in operations if operation.tensor.numel()]
    return dist.batch_isend_irecv(operations) if operations else []


SCALE_BYTES = 2  # of a bfloat16
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max


def to_float8(tensor: Tensor) -> Tensor:
    """Returns [..., head_dim] as bytes [..., head_dim + SCALE_BYTES]."""
    largest = torch.linalg.vector_norm(tensor, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scale = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    dim = tensor.shape[-1]
    packed = allocate((*tensor.shape[:-1], dim + SCALE_BYTES), scale.view(torch.uint8))
    packed[..., :dim].view(_FLOAT8).copy_(tensor / scale)
    packed[..., dim:].copy_(scale.view(torch.uint8))
    return packed


def from_float8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Undoes `to_float8`, but for rounding."""
    dim = packed.shape[-1] - SCALE_BYTES
    scale = packed[..., dim:].contiguous().view(torch.bfloat16)
    return packed[..., :dim].view(_FLOAT8).to(dtype) * scale.to(dtype)
