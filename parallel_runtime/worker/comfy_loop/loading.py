"""What a ModelSpec names, called again: ComfyUI's own loader, in this process, on this rank's device."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch

from ... import gguf
from ...errors import Refused
from ...jobs import Job
from ...mapped import load_mapped
from ...networks import network_of
from ...specs import ModelSpec
from .comfyui import named
from .model import ComfyModel
from .patch_models import PatchModels
from .weights import Merged, Weights

PACKS: dict[str, Callable[..., Any]] = {gguf.LOADER: gguf.load}  # other packs' loaders that workers may call


def load(
    patch_models: PatchModels, spec: ModelSpec, device: torch.device, on_share: Callable[[float], None], _: Job
) -> ComfyModel:
    """Raises Refused where this rank's ComfyUI holds the weights in another dtype than the host's."""
    assert comfy.model_management.get_torch_device().type == device.type
    on_share(0.0)
    arguments = json.loads(spec.arguments, object_hook=_out_of_json)
    if spec.loader in PACKS:
        patcher = PACKS[spec.loader](Weights, *arguments)
    else:
        patcher = load_mapped(Weights, named(spec.loader), arguments, spec.index)
    held = str(patcher.model.get_dtype()).removeprefix("torch.")
    if held != spec.weight_dtype:
        raise Refused(f"a worker holds this model in {held}, ComfyUI in {spec.weight_dtype}; give ComfyUI a flag that "
                      "settles it, such as --bf16-unet, or choose weight_dtype in the loader")  # fmt: skip
    # ComfyUI batches conditioning by free memory; ranks must not each decide by their own.
    patcher.model.memory_required = lambda *args, **kwargs: 0
    patcher.merged = Merged()
    on_share(1.0)
    network = patcher.model.diffusion_model
    return ComfyModel(spec, network, network_of(network), patcher=patcher, device=device, patch_models=patch_models)


def _out_of_json(value: dict[str, Any]) -> Any:
    """The other side is nodes/origin.py."""
    return getattr(torch, value["torch.dtype"]) if value.keys() == {"torch.dtype"} else value
