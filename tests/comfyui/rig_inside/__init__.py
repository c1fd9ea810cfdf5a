"""A test-only pack that replaces code inside networks as it is imported, in the workers too. A node sets what each
replacement does: nothing, at first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import comfy.ldm.flux.layers
import comfy.ldm.flux.math
import comfy.ldm.flux.model
import comfy.ldm.modules.attention
import comfy.ldm.wan.model
import comfy.ops
import comfy.samplers
import torch

GAINS = {}
LAYER_NORM = torch.nn.LayerNorm.forward


def _scaled(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    GAINS[name] = 1.0

    @functools.wraps(original)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if not isinstance(out, tuple):
            return out * GAINS[name]
        first, *others = out
        return (
            type(out)._make([first * GAINS[name], *others]) if hasattr(out, "_make") else (first * GAINS[name], *others)
        )

    return scaled


class Scaled:
    """An object in place of a function."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) * GAINS["object"]


class SingleStreamBlock(comfy.ldm.flux.layers.SingleStreamBlock):
    """In place of ComfyUI's class, of which networks are made."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * GAINS["class"]


class Inside:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "kind": (["nothing", "layer norm", *GAINS],)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def patch(self, model: Any, kind: str) -> tuple[Any]:
        GAINS.update({name: 0.9 if name == kind else 1.0 for name in GAINS})
        torch.nn.LayerNorm.forward = _halved if kind == "layer norm" else LAYER_NORM
        return (model.clone(),)


def _halved(self: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return LAYER_NORM(self, x) * 0.5


GAINS |= {"object": 1.0, "class": 1.0}
torch.nn.GroupNorm.forward = _scaled("group norm", torch.nn.GroupNorm.forward)
torch.nn.SiLU.forward = torch.no_grad()(_scaled("decorated", torch.nn.SiLU.forward))
torch.nn.functional.scaled_dot_product_attention = _scaled("sdpa", torch.nn.functional.scaled_dot_product_attention)
comfy.ops.disable_weight_init.Linear.forward = _scaled("linear", comfy.ops.disable_weight_init.Linear.forward)
comfy.samplers.get_area_and_mult = _scaled("area", comfy.samplers.get_area_and_mult)
comfy.ldm.flux.layers.DoubleStreamBlock.forward = _scaled("block", comfy.ldm.flux.layers.DoubleStreamBlock.forward)
comfy.ldm.wan.model.WanAttentionBlock.forward = _scaled("wan block", comfy.ldm.wan.model.WanAttentionBlock.forward)
comfy.ldm.flux.model.SingleStreamBlock = SingleStreamBlock
comfy.ldm.flux.layers.apply_mod = Scaled(comfy.ldm.flux.layers.apply_mod)
attention = _scaled("attention", comfy.ldm.modules.attention.optimized_attention)
for module in (comfy.ldm.modules.attention, comfy.ldm.flux.math, comfy.ldm.wan.model):
    module.optimized_attention = attention

NODE_CLASS_MAPPINGS = {"CPTest cp_inside": Inside}
