"""What stands in for ComfyUI's `diffusion_model`, on either side of the wire. Imports comfy, as both sides do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import Tensor, nn

from .errors import Refused

Evaluate = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]
# What transformer_options may hold that asks nothing of a block: ComfyUI's own notes, and what wrappers read.
OUTSIDE_BLOCKS = {
    "sample_sigmas", "sigmas", "uuids", "cond_or_uncond", "prefetch_dynamic_vbars", "wrappers", "callbacks",
    "easycache",
}  # fmt: skip


class StandIn(nn.Module):
    """Takes the place of `diffusion_model`: same call, answered by `evaluate(x, timestep, conditions)`.

    `shapes` gives it the network's parameters by name, without memory, for code that looks for names: LoRA loaders.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        dtype: torch.dtype,
        unet_config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.patch_size = unet_config.get("patch_size", 2)
        for name, shape in (shapes or {}).items():
            _register(self, name, nn.Parameter(torch.empty(shape, device="meta", dtype=dtype), requires_grad=False))
        if "in_dim" in unet_config and not shapes:  # Wan's concat_cond reads the channel count off the weight
            self.patch_embedding = SimpleNamespace(weight=SimpleNamespace(shape=(0, unet_config["in_dim"])))
        if unet_config.get("image_model") == "ltxv":  # what LTX-Video lays a mask's timesteps out with
            self.patchifier = SymmetricPatchifier(1)
        self.evaluate = evaluate

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
            names = ", ".join(sorted(unknown))
            raise Refused(
                f"the MODEL asks the transformer's blocks for {names}, which a worker cannot do; remove the node that "
                "does so, or take the model from Load Diffusion Model and a native sampler"
            )
        return self.evaluate(x, timestep, {"c_crossattn": context, **conds})


def _empty(option: Any) -> bool:
    return option is None or (isinstance(option, dict | list) and not option)


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path = name.split(".")
    for part, following in pairwise(path):
        if part not in module._modules:
            module.add_module(part, nn.ModuleList() if following.isdigit() else nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(path[-1], parameter)
