"""Loads the model of a ModelSpec with ComfyUI's own loader, in this process, on this rank's device."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch

from ...architectures import architecture_of
from ...errors import Refused
from ...jobs import Job
from ...loading import gguf
from ...loading.mapped import load_mapped
from ...specs import ModelSpec
from .additional_models import AdditionalModels
from .comfy_model import ComfyModel
from .comfyui import named
from .patcher import RankPatcher, WeightState

PACKS: dict[str, Callable[..., Any]] = {gguf.LOADER: gguf.load}  # loaders of other node packs


def load(
    additional: AdditionalModels, spec: ModelSpec, device: torch.device, on_progress: Callable[[float], None], _: Job
) -> ComfyModel:
    """Loads the model. Raises Refused where this rank's ComfyUI has the weights in another dtype than the host's."""
    assert comfy.model_management.get_torch_device().type == device.type
    on_progress(0.0)
    arguments = json.loads(spec.arguments, object_hook=_out_of_json)
    if spec.loader in PACKS:
        patcher = PACKS[spec.loader](RankPatcher, *arguments)
    else:
        patcher = load_mapped(RankPatcher, named(spec.loader), arguments, spec.index)
    dtype = str(patcher.model.get_dtype()).removeprefix("torch.")
    if dtype != spec.weight_dtype:
        raise Refused("model.dtype", dtype=dtype, expected=spec.weight_dtype)
    # ComfyUI batches conditioning by free memory, which differs between ranks: here all prompts fit.
    patcher.model.memory_required = lambda *args, **kwargs: 0
    patcher.weight_state = WeightState()
    on_progress(1.0)
    network = patcher.model.diffusion_model
    return ComfyModel(
        spec,
        network,
        architecture_of(network),
        patcher=patcher,
        device=device,
        additional=additional,
        partner=None if spec.partner is None else load(additional, spec.partner, device, on_progress, _),
    )


def _out_of_json(value: dict[str, Any]) -> Any:
    """Decodes the dtypes that nodes/describe/model.py encodes."""
    return getattr(torch, value["torch.dtype"]) if value.keys() == {"torch.dtype"} else value
