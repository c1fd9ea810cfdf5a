"""ComfyUI's model without its weights: conditioning, noise levels and latent format, and a stand-in that is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import Tensor

from ...errors import Refused
from ...specs import ComfyModel
from .comfyui import named

Evaluate = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]
# What transformer_options may hold that no block of the transformer would read.
OUTSIDE_BLOCKS = {"sample_sigmas", "sigmas", "uuids", "cond_or_uncond", "wrappers", "callbacks", "easycache"}


class StandIn(torch.nn.Module):
    """Takes the place of `diffusion_model`: same call, answered by `evaluate(x, timestep, conditions)`."""

    def __init__(self, evaluate: Evaluate, dtype: torch.dtype, unet_config: dict[str, Any]) -> None:
        super().__init__()
        self.dtype = dtype
        self.patch_size = unet_config.get("patch_size", 2)
        if "in_dim" in unet_config:  # Wan's concat_cond reads the channel count off the weight
            self.patch_embedding = SimpleNamespace(weight=SimpleNamespace(shape=(0, unet_config["in_dim"])))
        self._evaluate = evaluate

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
        **conds: Any,
    ) -> Tensor:
        options = transformer_options or {}
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, options, **conds)

    def _forward(
        self, x: Tensor, timestep: Tensor, context: Tensor | None, transformer_options: dict[str, Any], **conds: Any
    ) -> Tensor:
        unknown = {key for key in transformer_options.keys() - OUTSIDE_BLOCKS if not _empty(transformer_options[key])}
        if unknown:
            raise Refused(f"guidance asks the transformer's blocks for {', '.join(sorted(unknown))}, which a worker cannot do")
        return self._evaluate(x, timestep, {"c_crossattn": context, **conds})


def _empty(option: Any) -> bool:
    return option is None or (isinstance(option, dict | list) and not option)


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
