"""One quantisation scale for all ranks of a sequence, for ComfyUI's layers that scale their input by the largest value.

Only nvfp4 needs it: other formats have a scale for each token, or one in the file. Imports no ComfyUI.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import MeshDim
from .votes import all_gather_ints

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
