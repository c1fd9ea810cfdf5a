"""The engine's collectives: all-to-all, all-gather and ring send-receive, for chunks of unequal size; tensors as they
travel in float8; and what all ranks have to agree on.

Every size is known to every rank beforehand. Works on NCCL and on gloo, which has no uneven all-gather and moves only
CPU tensors: with gloo, tensors on a GPU are staged through the CPU (`MeshDim.comm_device`).

In float8 tensors have half of the bytes of bfloat16, and are not exact. Each head of a token has a scale of its own,
which lies behind its numbers: whatever cuts, sends or joins tokens and heads takes it along. Two ranks that are sent
the same bytes compute the same."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import Refused
from ...loading.fingerprint import fingerprint
from .mesh import GroupState, MeshDim
from .ranks import world_size

empty = torch.empty  # tests put functions here that fill with NaN
zeros = torch.zeros


def allocate(shape: Sequence[int], like: Tensor, device: torch.device | None = None) -> Tensor:
    """Returns uninitialised memory like `like`. All buffers of the engine come from here or from `allocate_scratch`."""
    return empty(tuple(shape), dtype=like.dtype, device=device or like.device)


def allocate_scratch(shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns zeros of the dtype and device of `like`, for buffers that many layers reuse."""
    # A test group that delivers nothing would otherwise time kernels on subnormal numbers.
    return zeros(tuple(shape), dtype=like.dtype, device=like.device)


@dataclass(frozen=True, eq=False)
class Pending:
    """A transfer under way. Its buffers may not be touched before `wait`, which returns what was received.

    The collective writes `recv_buffers`; `wait` copies them to `outputs` where they differ. `group_state` counts the
    seconds that this process waited. NCCL waits on the device instead, which `comm_timer` measures if it is set."""

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
    """Starts an all-to-all of flat tensors; so many elements go to, and come from, each rank (None: even counts)."""
    buffer = _comm_buffer(outputs, mesh_dim)
    options: Any = {"group": mesh_dim.group, "async_op": True}
    work = dist.all_to_all_single(buffer, _to_comm_device(send, mesh_dim), recv_counts, send_counts, **options)
    return Pending([work], [buffer], [outputs], mesh_dim.group_state)


def all_gather_v(chunk: Tensor, sizes: Sequence[int], mesh_dim: MeshDim, dim: int = 0) -> Tensor:
    """Gathers along `dim`: `chunk` [.., sizes[index], ..] of every rank makes [.., sum(sizes), ..], in rank order."""
    first = chunk.movedim(dim, 0) if dim else chunk
    (full,) = start_all_gather(first, sizes, mesh_dim, range(mesh_dim.size)).wait()
    return full.movedim(0, dim) if dim else full


def start_all_gather(chunk: Tensor, sizes: Sequence[int], mesh_dim: MeshDim, peers: Sequence[int]) -> Pending:
    """Starts an all-gather along dim 0 of the chunks of `peers`, in their order.

    Point to point, straight into place: nothing is padded, and on gloo it is faster than its all-gather."""
    output = allocate((sum(sizes[peer] for peer in peers), *chunk.shape[1:]), chunk)
    return _all_gather_p2p(output, chunk.contiguous(), peers, sizes, mesh_dim)


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
    # Received in the order in which they send to this rank: the one before it does so first.
    works = _start(dict.fromkeys(others, to_send), {peer: buffers[peer] for peer in reversed(others)}, mesh_dim)
    return Pending(works, [buffer], [output], mesh_dim.group_state)


def ring_send_recv(block: Tensor, recv_buffer: Tensor, mesh_dim: MeshDim) -> Pending:
    """Sends `block` to the next rank of a ring while the previous one's arrives in `recv_buffer`."""
    after, before = (mesh_dim.index + 1) % mesh_dim.size, (mesh_dim.index - 1) % mesh_dim.size
    return send_recv({after: block}, {before: recv_buffer}, mesh_dim)


def send_recv(send_tensors: Mapping[int, Tensor], recv_buffers: Mapping[int, Tensor], mesh_dim: MeshDim) -> Pending:
    """Sends `send_tensors[i]` to rank i of `mesh_dim`, while its tensor arrives in `recv_buffers[i]`; every rank knows
    all sizes beforehand. Returns the buffers, in their order."""
    buffers = {peer: _comm_buffer(tensor, mesh_dim) for peer, tensor in recv_buffers.items()}
    sent = {peer: _to_comm_device(tensor.contiguous(), mesh_dim) for peer, tensor in send_tensors.items()}
    works = _start(sent, buffers, mesh_dim)
    return Pending(works, list(buffers.values()), list(recv_buffers.values()), mesh_dim.group_state)


def _to_comm_device(tensor: Tensor, mesh_dim: MeshDim) -> Tensor:
    return tensor if mesh_dim.comm_device is None else tensor.to(mesh_dim.comm_device)


def _comm_buffer(tensor: Tensor, mesh_dim: MeshDim) -> Tensor:
    """Returns the buffer that the collective writes: `tensor`, or one of its shape on `comm_device`."""
    return tensor if mesh_dim.comm_device is None else allocate(tensor.shape, tensor, mesh_dim.comm_device)


def _start(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], mesh_dim: MeshDim) -> list[dist.Work]:
    """Starts to send and receive these tensors, by peer, in this order. Empty ones are left out, on both ends."""
    operations = [
        dist.P2POp(operation, tensor, mesh_dim.ranks[peer], mesh_dim.group)
        for operation, tensors in ((dist.isend, sent), (dist.irecv, received))
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
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


# A rank that leaves the loop, or skips blocks, alone leaves the others waiting in a collective forever. So no rank may
# act on what only it has seen (a message, a threshold, a failure) before it has asked by these, which gather ints on
# the CPU.


def all_gather_ints(numbers: Sequence[int], dim: MeshDim | None = None) -> list[list[int]]:
    """Returns the `numbers` of each rank of `dim` in order: equally many ints of 63 bits. Collective over `dim`, or
    over the whole group where it is None. In a test group that delivers nothing all numbers are this rank's."""
    size = world_size() if dim is None else dim.size
    if size == 1:
        return [list(numbers)]
    index, ranks = (dist.get_rank(), tuple(range(size))) if dim is None else (dim.index, dim.ranks)
    # Where tensors are on GPUs these waits of the CPU must not count as waits of the device.
    state = GroupState() if dim is None or dim.group_state.waited_seconds is None else dim.group_state
    cpu_dim = MeshDim(size=size, index=index, ranks=ranks, group_state=state)
    local = torch.tensor([numbers], dtype=torch.int64)
    (by_rank,) = all_gather_into(local.repeat(size, 1), local, [1] * size, cpu_dim).wait()
    return by_rank.tolist()


def all_gather_int(number: int, dim: MeshDim | None = None) -> list[int]:
    """Returns the `number` of each rank, in rank order. Collective as `all_gather_ints`."""
    return [value for (value,) in all_gather_ints([number], dim)]


def any_rank(flag: bool, dim: MeshDim | None = None) -> bool:
    """Returns true on every rank when it is true on any. Collective as `all_gather_ints`."""
    return any(all_gather_int(int(flag), dim))


def differing_ranks(*parts: str | bytes | Tensor, dim: MeshDim | None = None) -> list[int]:
    """Returns the ranks whose texts or tensors differ from rank 0's in any bit. Collective as `all_gather_ints`."""
    digests = all_gather_int(int(fingerprint(*parts)[:15], 16), dim)  # in base 16 so many digits fit into an int64
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


@contextmanager
def refuse_on_all_ranks(dim: MeshDim | None = None) -> Iterator[None]:
    """If one rank of `dim` raises Refused in this context, all do on leaving, so that none is waited for later.
    Every rank has to enter it, and no collective may follow a refusal within it. Collective as `all_gather_ints`."""
    refused: Refused | None = None
    try:
        yield
    except Refused as error:
        refused = error
    if any_rank(refused is not None, dim):
        raise refused or Refused()


_ACT = ("input_act", "act_weight", "act_eps")  # arguments of a layer of ComfyUI's
# Of quantised layers only these need one scale for all ranks: others have one for each token, or one in the file.
_NVFP4_LAYOUT = "TensorCoreNVFP4Layout"
_NVFP4_LARGEST = 448.0 * 6.0  # what a block's scale (e4m3) and a code (e2m1) reach: comfy_kitchen's nvfp4.py


@contextmanager
def shared_input_scales(network: nn.Module, context: MeshDim) -> Iterator[None]:
    """Within this context every nvfp4 layer without an `input_scale` quantises by the largest input of all `context`
    ranks.

    All ranks must call such a layer equally often, even without tokens."""
    # One that a rank's GPU cannot multiply in nvfp4 runs in full precision on all ranks, which would otherwise wait for
    # that rank's input.
    modules = network.modules() if context.size > 1 else ()
    layers: list[Any] = [layer for layer in modules if getattr(layer, "layout_type", None) == _NVFP4_LAYOUT]
    flags = [layer._full_precision_mm for layer in layers]
    flags_of_ranks = zip(*all_gather_ints(flags, context), strict=True)
    with ExitStack() as stack:
        for layer, flag, of_ranks in zip(layers, flags, flags_of_ranks, strict=True):
            stack.callback(setattr, layer, "_full_precision_mm", flag)
            layer._full_precision_mm = any(of_ranks)
            if not any(of_ranks) and getattr(layer, "input_scale", None) is None:
                hook = partial(_set_shared_scale, context)
                stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(_remove_scale, always_call=True))
        yield


@torch.compiler.disable
def _set_shared_scale(context: MeshDim, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    activations = args[0] if args else kwargs["input"]
    if not isinstance(activations, Tensor):
        return
    if kwargs.get("input_act") is not None:  # since ComfyUI 0.39 the layer quantises what this makes of its input
        modules = (sys.modules[kind.__module__] for kind in type(layer).__mro__)
        act = next(vars(module)["_eager_input_act"] for module in modules if hasattr(module, "_eager_input_act"))
        activations = act(activations, **{name: kwargs[name] for name in _ACT if name in kwargs})
    smoothing = getattr(layer, "pre_quant_scale", None)
    if smoothing is not None:
        activations = activations * smoothing.to(activations)
    local_max = activations.abs().amax() if activations.numel() else activations.new_zeros(())
    shared_max = local_max.to(device=context.comm_device or local_max.device, dtype=torch.float32)
    dist.all_reduce(shared_max, dist.ReduceOp.MAX, group=context.group)
    layer.input_scale = shared_max.to(local_max) / _NVFP4_LARGEST


def _remove_scale(layer: Any, *_: Any) -> None:
    vars(layer).pop("input_scale", None)
