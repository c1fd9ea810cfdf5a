"""What stages of a pipeline say to each other: tensors, each time with a word on what they are, or that nothing comes.

The word travels on the CPU, so that a stage knows dtype and shape without asking its device. A send waits for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Refused
from .exchange import Pending, allocate, any_of
from .mesh import Axis

TAG = 7  # of words and tensors on the CPU, where votes go between the same ranks
MOST, DIMS = 16, 6  # tensors at once, dims of each
UNDER_WAY = 8  # sends that nobody has taken yet, words too: more would hold more activations
ENDED = -1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)

Layout = tuple[torch.dtype, tuple[int, ...]]


class Passing:
    """Between the ranks of `axis`, in pairs; both ends know the order in which they talk."""

    def __init__(self, axis: Axis) -> None:
        self.given_bytes = 0
        self._axis = axis
        self._sent: deque[Pending] = deque()
        self._told = False  # that nothing more comes from here
        self._ended: set[int] = set()  # who told so

    def give(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send copies of them to this rank of the axis."""
        self._send(peer, _word(tensors), None)
        for tensor in tensors:
            if tensor.numel():
                self.given_bytes += tensor.nbytes
                self._send(peer, self._wired(tensor), self._axis.group)
        while len(self._sent) > UNDER_WAY:
            self._sent.popleft().wait()

    def take(self, peer: int, like: Sequence[Tensor]) -> list[Tensor]:
        """What it gives; Refused where that is other than `like` in shape, or where nothing comes."""
        layouts = self._layouts(peer)
        if layouts is None:
            raise Refused
        received = [self._receive(peer, layout, like[0].device) for layout in layouts]
        found, wanted = [list(x.shape) for x in received], [list(x.shape) for x in like]
        if found != wanted:
            raise Refused(
                f"a stage of the pipeline was given tokens of the shapes {found} and expected {wanted}; this ComfyUI "
                "or this input needs another plan: set pipeline_degree to 1"
            )
        return received

    def refuse(self) -> None:
        """Tell all others that nothing more comes: who waits for it refuses, too."""
        if not self._told:
            self._told = True
            for peer in self._axis.others:
                self._send(peer, torch.tensor([ENDED] + [0] * (MOST * (2 + DIMS))), None)

    def close(self, *, refused: bool) -> None:
        """All that was given has been taken: by who needed it, or, where any rank `refused`, by nobody. Raises Refused
        on all of them then. Collective."""
        if any_of(self._axis, refused):
            self.refuse()
            for peer in self._axis.others:
                while peer not in self._ended:
                    for layout in self._layouts(peer) or ():
                        self._receive(peer, layout, self._axis.wire or torch.device("cpu"))
        while self._sent:
            self._sent.popleft().wait()
        ended, self._told = self._told, False
        self._ended.clear()
        if ended:
            raise Refused

    def _wired(self, tensor: Tensor) -> Tensor:
        """What is sent: the next block may write into the tensor."""
        if self._axis.wire is None or self._axis.wire == tensor.device:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.to(self._axis.wire).contiguous()

    def _send(self, peer: int, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        work = dist.isend(tensor, self._axis.ranks[peer], group=group, tag=TAG)
        assert work is not None
        self._sent.append(Pending([work], [tensor], [tensor], self._axis.world))

    def _layouts(self, peer: int) -> list[Layout] | None:
        """Of what comes next; None where that is nothing."""
        word = torch.zeros(1 + MOST * (2 + DIMS), dtype=torch.int64)
        self._await(word, peer, None)
        count, *numbers = word.tolist()
        if count == ENDED:
            self._ended.add(peer)
            return None
        rows = [numbers[at : at + 2 + DIMS] for at in range(0, count * (2 + DIMS), 2 + DIMS)]
        return [(DTYPES[dtype], tuple(dims[:ndim])) for dtype, ndim, *dims in rows]

    def _receive(self, peer: int, layout: Layout, device: torch.device) -> Tensor:
        dtype, shape = layout
        arriving = allocate(shape, torch.empty(0, dtype=dtype, device=self._axis.wire or device))
        if arriving.numel():
            self._await(arriving, peer, self._axis.group)
        return arriving.to(device)

    def _await(self, arriving: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        work = dist.irecv(arriving, self._axis.ranks[peer], group=group, tag=TAG)
        assert work is not None
        Pending([work], [arriving], [arriving], self._axis.world).wait()


def _word(tensors: Sequence[Tensor]) -> Tensor:
    assert len(tensors) <= MOST
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *[0] * (DIMS - tensor.ndim)]
    return torch.tensor(numbers + [0] * ((MOST - len(tensors)) * (2 + DIMS)))
