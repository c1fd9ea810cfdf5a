"""One largest value for all ranks of a sequence, where a layer of ComfyUI's quantises its input by that of all tokens.

Only nvfp4 does: other formats have a scale a token, or one that the file brings. Imports no ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable
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


def agree_on_scales(network: nn.Module, context: Axis) -> list[RemovableHandle]:
    """Have every nvfp4 layer without an `input_scale` of its own quantise by the largest input of all `context` ranks.

    All of them must call such a layer equally often, with no input too. What a card of one of them cannot multiply in
    nvfp4 none does: the others would wait for its largest input.
    """
    if context.size == 1:
        return []
    layers: list[Any] = [layer for layer in network.modules() if getattr(layer, "layout_type", None) == _LAYOUT]
    handles = []
    in_full_somewhere = any_of_each(context, [layer._full_precision_mm for layer in layers])
    for layer, full in zip(layers, in_full_somewhere, strict=True):
        if full:
            handles += _around(layer, _in_full, partial(_as_before, layer._full_precision_mm))
        elif getattr(layer, "input_scale", None) is None:
            handles += _around(layer, partial(_agree, context), _forget)
    return handles


def _around(layer: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[RemovableHandle]:
    return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after, always_call=True)]


def _in_full(layer: Any, _: Any) -> None:
    layer._full_precision_mm = True


def _as_before(full: bool, layer: Any, *_: Any) -> None:
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
