"""One largest value for all ranks of a sequence, where a layer of ComfyUI's quantises its input by that of all tokens.

Only nvfp4 does: other formats have a scale a token, or one that the file brings. Imports no ComfyUI.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .exchange import any_of_each
from .mesh import Axis

_LAYOUT = "TensorCoreNVFP4Layout"
_LARGEST = 448.0 * 6.0  # what a block's scale (e4m3) and a code (e2m1) reach: comfy_kitchen's nvfp4.py


@contextmanager
def one_scale(network: nn.Module, context: Axis) -> Iterator[None]:
    """In here every nvfp4 layer without an `input_scale` of its own quantises by the largest input of all `context`
    ranks.

    All of them must call such a layer equally often, with no input too. What a card of one of them cannot multiply in
    nvfp4 none does: the others would wait for its largest input.
    """
    found = network.modules() if context.size > 1 else ()
    layers: list[Any] = [layer for layer in found if getattr(layer, "layout_type", None) == _LAYOUT]
    before = [layer._full_precision_mm for layer in layers]
    handles: list[RemovableHandle] = []
    for layer, in_full_somewhere in zip(layers, any_of_each(context, before), strict=True):
        layer._full_precision_mm = in_full_somewhere
        if not in_full_somewhere and getattr(layer, "input_scale", None) is None:
            handles.append(layer.register_forward_pre_hook(partial(_agree, context)))
            handles.append(layer.register_forward_hook(_forget, always_call=True))
    yield
    for handle in handles:
        handle.remove()
    for layer, full in zip(layers, before, strict=True):
        layer._full_precision_mm = full


@torch.compiler.disable
def _agree(context: Axis, layer: Any, args: tuple[Any, ...]) -> None:
    if not isinstance(args[0], Tensor):
        return
    given = args[0]
    smoothing = getattr(layer, "pre_quant_scale", None)
    if smoothing is not None:
        given = given * smoothing.to(given)
    here = given.abs().amax() if given.numel() else given.new_zeros(())
    largest = here.to(device=context.wire or here.device, dtype=torch.float32)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=context.group)
    layer.input_scale = largest.to(here) / _LARGEST


def _forget(layer: Any, *_: Any) -> None:
    vars(layer).pop("input_scale", None)
