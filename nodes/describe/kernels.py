"""The attention that a user chose for a MODEL: by a node, by the file, or by ComfyUI's flags."""

from __future__ import annotations

from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.accelerators import KERNELS, ring_backend
from ...parallel_runtime.architectures.network_modules import preferred_attentions
from ...parallel_runtime.loading.code_names import qualified_name
from ...parallel_runtime.request import ParallelRequest
from .model_patches import OVERRIDE, native_network

FLAGS = (
    "use_sage_attention", "use_flash_attention", "use_ck_attention", "use_split_cross_attention",
    "use_quad_cross_attention",
)  # fmt: skip  # not the one for PyTorch's own: what a ring has is PyTorch's too


def without_lse(model: ModelPatcher, request: ParallelRequest) -> str:
    """Names the attention of this MODEL that a user chose and a ring cannot have, as it gives no log-sum-exp to merge
    blocks of keys by; "" if there is none."""
    override = model.model_options["transformer_options"].get(OVERRIDE)
    if override is not None:
        return qualified_name(override)
    if request.options.attention_backend != "auto":
        return ""
    for function in preferred_attentions(native_network(model)).values():
        if not _has_lse(function):
            return qualified_name(function)
    flag = next((flag for flag in FLAGS if getattr(args, flag, False)), None)
    if flag is None or _has_lse(comfy.ldm.modules.attention.optimized_attention):
        return ""
    return f"--{flag.replace('_', '-')}"


def _has_lse(function: Any) -> bool:
    """Has a ring on ComfyUI's kind of device a kernel of what this attention function of ComfyUI's calls?"""
    backend, kind = ring_backend(function.__name__), comfy.model_management.get_torch_device().type
    return backend == "auto" or (backend != "" and kind in KERNELS[backend].devices)
