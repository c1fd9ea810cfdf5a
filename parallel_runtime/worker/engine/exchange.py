"""The collectives of the engine: flat exchange, gather and ring hop, all for chunks of unequal size.

Every size is known to every rank beforehand. Works on NCCL and on gloo, which has no uneven all-gather and moves only
CPU tensors: where tensors live on a GPU and the group is gloo's (`Axis.wire`), they are staged through the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis, World

Spare = Callable[[Sequence[int], str], Tensor]  # memory of this shape for this use

empty = torch.empty  # tests put functions here that fill with NaN
zeros = torch.zeros


def allocate(shape: Sequence[int], like: Tensor, device: torch.device | None = None) -> Tensor:
    """Memory to receive into, of the dtype and device of `like`. All buffers of the engine come from here or
    from `allocate_kept`."""
    return empty(tuple(shape), dtype=like.dtype, device=device or like.device)


def allocate_kept(shape: Sequence[int], like: Tensor) -> Tensor:
    """The same for memory that many layers use. Numbers from the start, for runs in a group that delivers nothing:
    what a kernel takes for subnormals would be what such a run times."""
    return zeros(tuple(shape), dtype=like.dtype, device=like.device)


class Pending:
    """A transfer under way. Its buffers may not be touched before `wait`, which returns what was received.

    `arriving` are the tensors that the collective writes, `received` those that the caller wants it in. `world` hears
    how long this process stood still for it. Transfers of NCCL wait on the device, as is seen where somebody watches.
    """

    def __init__(
        self, works: Sequence[dist.Work], arriving: Sequence[Tensor], received: list[Tensor], world: World
    ) -> None:
        self._world = world
        self._works = works
        self._arriving = arriving
        self._received = received

    def wait(self) -> list[Tensor]:
        if all(tensor.device.type == "cpu" for tensor in self._arriving):
            began = time.monotonic()
            self._wait()
            self._world.waited_seconds = (self._world.waited_seconds or 0.0) + time.monotonic() - began
        elif self._world.standstill is not None:
            self._world.standstill.around(self._wait)
        else:
            self._wait()
        for arrived, tensor in zip(self._arriving, self._received, strict=True):
            if arrived is not tensor:
                tensor.copy_(arrived)
        return self._received

    def _wait(self) -> None:
        for work in self._works:
            work.wait()


def exchange(
    send: Tensor, received: Tensor, counts_out: list[int] | None, counts_in: list[int] | None, axis: Axis
) -> Pending:
    """All-to-all of flat tensors: `counts_out[i]` elements go to rank i, `counts_in[i]` come from it (None: even)."""
    arriving = _at_wire(received, axis)
    options: Any = {"group": axis.group, "async_op": True}
    work = dist.all_to_all_single(arriving, _to_wire(send, axis), counts_in, counts_out, **options)
    return Pending([work], [arriving], [received], axis.world)


def gather(chunk: Tensor, sizes: Sequence[int], axis: Axis) -> Pending:
    """All-gather along dim 0: `chunk` [sizes[index], ...] of every rank makes [sum(sizes), ...], in rank order.

    Point to point, straight into place: nothing is padded, and on gloo it is faster than its all-gather.
    """
    whole = allocate((sum(sizes), *chunk.shape[1:]), chunk)
    return _collect(whole, chunk.contiguous(), range(axis.size), sizes, axis)


def gather_others(chunk: Tensor, sizes: Sequence[int], axis: Axis) -> Pending:
    """The same of all other ranks, those after this one first: [sum of their sizes, ...]."""
    others = allocate((sum(sizes) - sizes[axis.index], *chunk.shape[1:]), chunk)
    return _collect(others, chunk.contiguous(), axis.others, sizes, axis)


def gather_into(whole: Tensor, chunk: Tensor, sizes: Sequence[int], axis: Axis) -> Pending:
    """All-gather of flat chunks [sizes[index]] into `whole`, in rank order."""
    if whole.device.type == "cpu" or axis.wire is not None or len(set(sizes)) > 1:
        return _collect(whole, chunk, range(axis.size), sizes, axis)
    work = dist.all_gather_into_tensor(whole, chunk, group=axis.group, async_op=True)
    return Pending([work], [whole], [whole], axis.world)


def _collect(whole: Tensor, chunk: Tensor, peers: Sequence[int], sizes: Sequence[int], axis: Axis) -> Pending:
    """The chunks of these ranks in this order, all others among them: no link carries everybody's first message."""
    arriving, wired, others = _at_wire(whole, axis), _to_wire(chunk, axis), axis.others
    places = dict(zip(peers, arriving.split([sizes[peer] for peer in peers]), strict=True))
    if axis.index in places:
        places[axis.index].copy_(wired)
    operations = [_p2p(dist.isend, wired, peer, axis) for peer in others]
    operations += [_p2p(dist.irecv, places[peer], peer, axis) for peer in reversed(others)]
    return Pending(_start(operations), [arriving], [whole], axis.world)


def hop(block: Tensor, spare: Tensor, axis: Axis) -> Pending:
    """Send `block` to the next rank of a ring while the previous one's arrives in `spare`."""
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    arriving = _at_wire(spare, axis)
    operations = [_p2p(dist.isend, _to_wire(block, axis), after, axis), _p2p(dist.irecv, arriving, before, axis)]
    return Pending(_start(operations), [arriving], [spare], axis.world)


def trade(give: Mapping[int, Tensor], take: Mapping[int, Sequence[int]], axis: Axis, *, like: Tensor) -> Pending:
    """Send `give[i]` to rank i of the axis, and receive from it a tensor of the shape `take[i]`, in `take`'s order.

    All of them are of the dtype and device of `like`; every rank knows who sends what.
    """
    received = [allocate(shape, like) for shape in take.values()]
    arriving = [_at_wire(tensor, axis) for tensor in received]
    operations = [_p2p(dist.isend, _to_wire(tensor.contiguous(), axis), peer, axis) for peer, tensor in give.items()]
    operations += [_p2p(dist.irecv, place, peer, axis) for peer, place in zip(take, arriving, strict=True)]
    return Pending(_start(operations), arriving, received, axis.world)


def any_of(axis: Axis, flag: bool) -> bool:
    """True on each rank of `axis` when it is true on any. Collective among them alone, on the CPU."""
    return any_of_each(axis, [flag])[0]


def any_of_each(axis: Axis, flags: Sequence[bool]) -> list[bool]:
    """The same of several, of which all ranks have as many."""
    if axis.size == 1:
        return list(flags)
    voters = Axis(size=axis.size, index=axis.index, ranks=axis.ranks, world=axis.world)
    (votes,) = gather(torch.tensor([flags], dtype=torch.uint8), [1] * voters.size, voters).wait()
    return [bool(vote) for vote in votes.amax(dim=0)]


def _to_wire(tensor: Tensor, axis: Axis) -> Tensor:
    return tensor if axis.wire is None else tensor.to(axis.wire)


def _at_wire(tensor: Tensor, axis: Axis) -> Tensor:
    """Where the collective writes what `tensor` shall be."""
    return tensor if axis.wire is None else allocate(tensor.shape, tensor, axis.wire)


def _p2p(operation: Callable[..., Any], tensor: Tensor, peer: int, axis: Axis) -> dist.P2POp:
    return dist.P2POp(operation, tensor, axis.ranks[peer], axis.group)


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Both ends know which tensors are empty, so neither waits for them."""
    operations = [operation for operation in operations if operation.tensor.numel()]
    return dist.batch_isend_irecv(operations) if operations else []
