"""ComfyUI's model without its weights: conditioning, noise levels and latent format, and a stand-in that is called."""

from __future__ import annotations

import json
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ...specs import ComfyModel
from ...stand_in import Evaluate, StandIn
from .comfyui import named


def weightless(
    comfy_model: ComfyModel, dtype: torch.dtype, sampling: dict[str, Any], evaluate: Evaluate
) -> comfy.model_patcher.ModelPatcher:
    """A MODEL that samples like the host's, with `evaluate` as its network.

    `dtype` is what ComfyUI computes in, so what it casts the network's inputs to; `sampling` comes from
    nodes/describe.py.
    """
    unet_config = json.loads(comfy_model.unet_config)
    config = getattr(comfy.supported_models, comfy_model.config_class)(unet_config)
    config.set_inference_dtype(dtype, None)
    config.unet_config["disable_unet_model_creation"] = True
    model = config.get_model({}, "")
    model.diffusion_model = StandIn(evaluate, dtype, unet_config)
    # ComfyUI batches conditioning by free memory; ranks must not each decide by their own.
    model.memory_required = lambda *args, **kwargs: 0
    model.model_sampling = rebuild_sampling(sampling)
    device = comfy.model_management.get_torch_device()
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))


def rebuild_sampling(sampling: dict[str, Any]) -> torch.nn.Module:
    """The host's `model_sampling` again: same bases, parameters and buffers."""
    bases = tuple(named(name) for name in sampling["bases"])
    module: torch.nn.Module = torch.nn.Module.__new__(type("ModelSampling", bases, {}))
    torch.nn.Module.__init__(module)
    for name, value in sampling["attributes"].items():
        setattr(module, name, value)
    for name, buffer in sampling["buffers"].items():
        module.register_buffer(name, buffer.clone(), persistent=False)
    return module
