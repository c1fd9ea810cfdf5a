"""A test-only pack that replaces code of ComfyUI's and torch's as it is imported, in the workers too; as
`cp_otherwise`, in the workers alone. A node replaces more, in ComfyUI's process alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import comfy.samplers
import torch

ORIGINAL = comfy.samplers.sampling_function
SETTINGS = {"gain": 1.0}
NAME = os.path.basename(os.path.dirname(__file__))


def _times(factor: float, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * factor * SETTINGS["gain"]

    return replaced


def _darker(args: dict[str, Any]) -> Any:
    return args["denoised"] * 0.9


class Replace:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "what": (["nothing", "sampling_function", "gain"],)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def patch(self, model: Any, what: str) -> tuple[Any]:
        comfy.samplers.sampling_function = _times(0.97, ORIGINAL) if what == "sampling_function" else ORIGINAL
        SETTINGS["gain"] = 0.9 if what == "gain" else 1.0
        patched = model.clone()
        patched.set_model_sampler_post_cfg_function(_darker)
        return (patched,)


if NAME == "cp_replacing":
    comfy.samplers.cfg_function = _times(0.98, comfy.samplers.cfg_function)
    torch.nn.GroupNorm.forward = _times(0.9, torch.nn.GroupNorm.forward)
elif "RANK" in os.environ:
    comfy.samplers.cfg_function = _times(0.5, comfy.samplers.cfg_function)
    torch.nn.RMSNorm.forward = _times(0.5, torch.nn.RMSNorm.forward)

NODE_CLASS_MAPPINGS = {f"CPTest {NAME}": Replace}
