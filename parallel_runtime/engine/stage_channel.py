"""Sends tensors between the stages of a pipeline, each time after a message of their layout, or that no more come.

The message travels on the CPU, so that a stage knows dtype and shape without asking its device. A send never blocks."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Refused, Unsplittable
from .comm.collectives import Pending, allocate, any_rank
from .comm.mesh import MeshDim

TAG = 7  # of messages and tensors on the CPU, where votes use the same ranks
MESSAGE_SHAPE = (1 + 16, 2 + 6)  # a row with the number of tensors, or END; then of each tensor dtype, ndim and shape
MAX_PENDING_SENDS = 8  # sends not yet received, messages too: more would keep more activations
END = -1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)

Layout = tuple[torch.dtype, tuple[int, ...]]


class StageChannel:
    """Point-to-point transfers between the ranks of `mesh_dim`; both ends know the order of transfers."""

    def __init__(self, mesh_dim: MeshDim) -> None:
        self.sent_bytes = 0
        self._mesh_dim = mesh_dim
        self._pending_sends: deque[Pending] = deque()
        self._end_sent = False  # this rank announced that no more comes
        self._ended_peers: set[int] = set()  # peers that announced the same

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        self._send(peer, _layout_message(tensors), None)
        for tensor in tensors:
            if tensor.numel():
                self.sent_bytes += tensor.nbytes
                device = self._mesh_dim.comm_device or tensor.device  # a copy: the next block may write into `tensor`
                copy = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
                self._send(peer, copy, self._mesh_dim.group)
        while len(self._pending_sends) > MAX_PENDING_SENDS:
            self._pending_sends.popleft().wait()

    def recv(self, peer: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors that `peer` sends; Refused where shapes are not those of `like`, or where none come."""
        layouts = self._recv_layouts(peer)
        if layouts is None:
            raise Refused
        received = [self._recv(peer, layout, like[0].device) for layout in layouts]
        shapes, expected = [list(x.shape) for x in received], [list(x.shape) for x in like]
        if shapes != expected:
            raise Unsplittable(f"a stage was given tokens of {shapes} and expected {expected}", "pipeline_degree")
        return received

    def send_end(self) -> None:
        """Announces to all peers that no more comes: a peer that waits in `recv` raises Refused."""
        if not self._end_sent:
            self._end_sent = True
            for peer in self._mesh_dim.other_ranks:
                self._send(peer, torch.full(MESSAGE_SHAPE, END), None)

    def close(self, *, refused: bool) -> None:
        """Waits until all is received. If any rank `refused`, drops it and raises Refused on all. Collective."""
        if any_rank(refused, self._mesh_dim):
            self.send_end()
            for peer in self._mesh_dim.other_ranks:
                while peer not in self._ended_peers:
                    for layout in self._recv_layouts(peer) or ():
                        self._recv(peer, layout, self._mesh_dim.comm_device or torch.device("cpu"))
        while self._pending_sends:
            self._pending_sends.popleft().wait()
        ended, self._end_sent = self._end_sent, False
        self._ended_peers.clear()
        if ended:
            raise Refused

    def _send(self, peer: int, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        work = dist.isend(tensor, self._mesh_dim.ranks[peer], group=group, tag=TAG)
        assert work is not None
        self._pending_sends.append(Pending([work], [tensor], [tensor], self._mesh_dim.group_state))

    def _recv_layouts(self, peer: int) -> list[Layout] | None:
        """Returns the layouts of the tensors that come next; None where the peer announced the end."""
        message = torch.empty(MESSAGE_SHAPE, dtype=torch.int64)
        self._recv_into(message, peer, None)
        (count, *_), *rows = message.tolist()
        if count == END:
            self._ended_peers.add(peer)
            return None
        return [(DTYPES[dtype], tuple(dims[:ndim])) for dtype, ndim, *dims in rows[:count]]

    def _recv(self, peer: int, layout: Layout, device: torch.device) -> Tensor:
        dtype, shape = layout
        received = allocate(shape, torch.empty(0, dtype=dtype, device=self._mesh_dim.comm_device or device))
        if received.numel():
            self._recv_into(received, peer, self._mesh_dim.group)
        return received.to(device)

    def _recv_into(self, buffer: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        work = dist.irecv(buffer, self._mesh_dim.ranks[peer], group=group, tag=TAG)
        assert work is not None
        Pending([work], [buffer], [buffer], self._mesh_dim.group_state).wait()


def _layout_message(tensors: Sequence[Tensor]) -> Tensor:
    message = torch.zeros(MESSAGE_SHAPE, dtype=torch.int64)
    message[0, 0] = len(tensors)
    for row, tensor in zip(message[1 : 1 + len(tensors)], tensors, strict=True):
        row[: 2 + tensor.ndim] = torch.tensor([DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
    return message
