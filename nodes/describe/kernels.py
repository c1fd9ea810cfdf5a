"""The attention that a user chose for a MODEL: by a node, by the file, or by ComfyUI's flags."""

from __future__ import annotations

import comfy.ldm.modules.attention
import comfy.model_management
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.accelerators import KERNELS, ring_backend
from ...parallel_runtime.architectures.block_patches import attention_called_by
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
        return "" if _has_lse(attention_called_by(override)) else qualified_name(override)
    if request.options.attention_backend != "auto":
        return ""
    for function in preferred_attentions(native_network(model)).values():
        if not _has_lse(function.__name__):
            return qualified_name(function)
    flag = next((flag for flag in FLAGS if getattr(args, flag, False)), None)
    own = comfy.ldm.modules.attention.optimized_attention
    if flag is None or _has_lse(own.__name__):
        return ""
    return f"--{flag.replace('_', '-')}"


def _has_lse(function: str) -> bool:
    """Has a ring on ComfyUI's kind of device a kernel of what the attention function of this name calls?"""
    backend, kind = ring_backend(function), comfy.model_management.get_torch_device().type
    return backend == "auto" or (backend != "" and kind in KERNELS[backend].devices)
