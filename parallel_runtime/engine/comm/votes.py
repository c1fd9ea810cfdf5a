"""What all ranks have to agree on: decisions, for which ints of every rank are gathered on the CPU, and the scale of
ComfyUI's layers that scale their input by the largest value.

A rank that leaves the loop, or skips blocks, alone leaves the others waiting in a collective forever. So no rank may
act on what only it has seen (a message, a threshold, a failure) before it has asked here.

Only nvfp4 needs one scale for all ranks: other formats have a scale for each token, or one in the file.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import Refused
from ...loading.fingerprint import fingerprint
from .collectives import all_gather_into
from .mesh import GroupState, MeshDim
from .ranks import world_size

FINGERPRINT_DIGITS = 15  # in base 16: what fits into an int64


def all_gather_ints(numbers: Sequence[int], dim: MeshDim | None = None) -> list[list[int]]:
    """Returns the `numbers` of each rank of `dim` in order: equally many ints of 63 bits. Collective over `dim`, or
    over the whole group where it is None. In a test group that delivers nothing all numbers are this rank's."""
    size = world_size() if dim is None else dim.size
    if size == 1:
        return [list(numbers)]
    index, ranks = (dist.get_rank(), tuple(range(size))) if dim is None else (dim.index, dim.ranks)
    # Where tensors are on GPUs these waits of the CPU must not count as waits of the device.
    timed = dim is not None and dim.group_state.waited_seconds is not None
    cpu_dim = MeshDim(
        size=size, index=index, ranks=ranks, group_state=dim.group_state if dim and timed else GroupState()
    )
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
    """Returns the ranks whose texts or tensors differ from the first one's in any bit. Collective as
    `all_gather_ints`."""
    digests = all_gather_int(int(fingerprint(*parts)[:FINGERPRINT_DIGITS], 16), dim)
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


_LAYOUT = "TensorCoreNVFP4Layout"
_LARGEST = 448.0 * 6.0  # what a block's scale (e4m3) and a code (e2m1) reach: comfy_kitchen's nvfp4.py


@contextmanager
def shared_input_scales(network: nn.Module, context: MeshDim) -> Iterator[None]:
    """Within this context every nvfp4 layer without an `input_scale` quantises by the largest input of all `context`
    ranks.

    All ranks must call such a layer equally often, even without tokens. A layer that one rank's GPU cannot multiply in
    nvfp4 runs in full precision on all ranks, which would otherwise wait for that rank's input.
    """
    modules = network.modules() if context.size > 1 else ()
    layers: list[Any] = [layer for layer in modules if getattr(layer, "layout_type", None) == _LAYOUT]
    flags = [layer._full_precision_mm for layer in layers]
    flags_of_ranks = zip(*all_gather_ints(flags, context), strict=True)
    with ExitStack() as stack:
        for layer, flag, of_ranks in zip(layers, flags, flags_of_ranks, strict=True):
            stack.callback(setattr, layer, "_full_precision_mm", flag)
            layer._full_precision_mm = any(of_ranks)
            if not any(of_ranks) and getattr(layer, "input_scale", None) is None:
                stack.enter_context(layer.register_forward_pre_hook(partial(_set_shared_scale, context)))
                stack.enter_context(layer.register_forward_hook(_remove_scale, always_call=True))
        yield


@torch.compiler.disable
def _set_shared_scale(context: MeshDim, layer: Any, args: tuple[Any, ...]) -> None:
    if not isinstance(args[0], Tensor):
        return
    activations = args[0]
    smoothing = getattr(layer, "pre_quant_scale", None)
    if smoothing is not None:
        activations = activations * smoothing.to(activations)
    local_max = activations.abs().amax() if activations.numel() else activations.new_zeros(())
    shared_max = local_max.to(device=context.comm_device or local_max.device, dtype=torch.float32)
    dist.all_reduce(shared_max, dist.ReduceOp.MAX, group=context.group)
    layer.input_scale = shared_max.to(local_max) / _LARGEST


def _remove_scale(layer: Any, *_: Any) -> None:
    vars(layer).pop("input_scale", None)
