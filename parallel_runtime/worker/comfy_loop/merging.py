"""LoRA and other weight patches, merged into a loaded transformer by ComfyUI's own maths. Knows no kind of adapter.

Whatever was merged before, a weight is made from the file's: nothing accumulates, and no patches give back the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ...errors import Refused
from ..models import Model
from ..weights import Weights
from .code import rebuild


def merge(model: Model, patches: Mapping[str, list[Any]] | None, on_share: Callable[[float], None]) -> None:
    """Give the transformer the weights that `model.spec.patches` names; touches only what differs from the last time.

    `patches` holds, by ComfyUI's name of a weight, what nodes/patches.py describes; None where they are merged already.
    """
    if model.merged == model.spec.patches:
        return
    if patches is None:
        raise Refused("the weight patches of this model were not sent")
    weights = Weights(model.spec.path)
    affected = model.patched | patches.keys()
    names = [name for name in weights.header.shapes if model.family.comfy_name(name) in affected]
    slots = model.transformer.state_dict()
    for index, (name, tensor) in enumerate(weights.some(names)):
        dtype = _dtype(model, name, tensor)
        merged = _merged(model.family.comfy_name(name), tensor.to(dtype), patches)
        for target, piece in model.family.convert(name, merged):
            if piece.shape != slots[target].shape:
                raise Refused(f"a patch gives {name} another shape, {tuple(merged.shape)} for {tuple(tensor.shape)}")
            slots[target].copy_(piece)
        on_share(index / len(names))
    model.merged, model.patched = model.spec.patches, frozenset(patches)


def _dtype(model: Model, name: str, tensor: Tensor) -> torch.dtype:
    """What ComfyUI holds this weight in."""
    if any(model.family.in_float32(target) for target, _ in model.family.convert(name, tensor)):
        return torch.float32
    return getattr(torch, model.spec.weight_dtype)


def _merged(name: str, weight: Tensor, patches: Mapping[str, list[Any]]) -> Tensor:
    """As ModelPatcher.patch_weight_to_device does it."""
    if name not in patches:
        return weight
    key = f"diffusion_model.{name}"
    device = comfy.model_management.get_torch_device()
    dtype = comfy.model_management.lora_compute_dtype(device)
    start = comfy.model_management.cast_to_device(weight, device, dtype, copy=True)
    merged = comfy.lora.calculate_weight(rebuild(patches[name]), start, key)
    return comfy.float.stochastic_rounding(merged, weight.dtype, seed=comfy.utils.string_to_seed(key))
