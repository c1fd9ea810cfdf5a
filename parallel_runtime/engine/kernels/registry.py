"""The functions of every kernel in accelerators.KERNELS, as PyTorch and the packages flash_attn, flash_attn_interface
(FA3) and sageattention have them. Knows no ranks and no other way to attend.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.torch_version import TorchVersion

from ...accelerators import KERNELS, AttentionKernel

# [B, tokens, heads, D] of queries, keys and values, a mask or bias, a scale; to an output of the queries' shape.
FullAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]
# Takes queries, keys, values, a scale; returns the output and its log-sum-exp [B, Sq, H, 1], float32.
BlockAttention = Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]

CUDNN_GRAPHS_VERSION = 91500  # below, what it computes in a CUDA graph may be wrong (NVIDIA/TransformerEngine#2344)
_HALF = (torch.float16, torch.bfloat16)
_OLDEST_GPU = (8, 0)  # its compute capability
_OLDEST = {kernel.package: kernel.min_version for kernel in KERNELS.values() if kernel.min_version}


@dataclass(frozen=True, kw_only=True)
class KernelFunctions:
    """A kernel's functions: `full` returns the output, `block` also the log-sum-exp (None if the kernel has none)."""

    spec: AttentionKernel
    full: FullAttention
    block: BlockAttention | None

    @property
    def missing_reason(self) -> str:
        """Returns why its package cannot be used here; "" if it can, or if it needs none."""
        return package_missing_reason(self.spec.package) if self.spec.package else ""

    def unsupported_reason(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
        """Returns why the kernel does not support these; "" if no reason is known."""
        if query.device.type not in self.spec.devices:
            return f"it needs a {' / '.join(self.spec.devices).upper()} GPU, and the tensors are on {query.device.type}"
        if reason := self.missing_reason:
            return reason
        if mask is not None and not self.spec.masks:
            return "it takes no mask"
        if {query.dtype, key.dtype, value.dtype} not in ({half} for half in _HALF):
            return f"it takes bfloat16 or float16, not {str(query.dtype).removeprefix('torch.')}"
        size = query.shape[-1]
        if size > self.spec.max_head_dim or value.shape[-1] != size:
            return f"it takes heads of up to {self.spec.max_head_dim}, not of {size}"
        if self.spec.head_dims and size not in self.spec.head_dims:
            return f"it takes heads of {' or '.join(map(str, self.spec.head_dims))}, not of {size}"
        if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < _OLDEST_GPU:
            return "this GPU is too old for it"
        return ""

    def unsupported_block_reason(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> str:
        """Returns why the kernel does not support these with log-sum-exp; "" if no reason is known."""
        if not self.spec.log_sum_exp:
            return "it gives no log-sum-exp"
        if bias is not None:
            return "it gives no log-sum-exp with a mask"
        return self.unsupported_reason(query, key, value, None)

    def with_log_sum_exp(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        assert self.block is not None, self.spec.name
        return self.block(query, key, value, scale)


def package_missing_reason(package: str) -> str:
    package_or_reason = _imported(package)
    return package_or_reason if isinstance(package_or_reason, str) else ""


@cache
def _imported(package: str) -> Any:
    """Returns the package, or why there is none. Several were built for one PyTorch only, and fail in another as they
    like."""
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        return f"it needs the package {package}: {error}"
    with suppress(importlib.metadata.PackageNotFoundError):
        if TorchVersion(importlib.metadata.version(package)) < (oldest := _OLDEST.get(package, "0")):
            return f"it needs {package} {oldest} or newer"
    return module


def cudnn_supports_graphs() -> bool:
    """Returns whether cuDNN's attention computes correctly in a CUDA graph."""
    return (torch.backends.cudnn.version() or 0) >= CUDNN_GRAPHS_VERSION


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turns each [B, tokens, H, D] into [B, H, tokens, D], or back: views."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Calls PyTorch's scaled_dot_product_attention with its own choice of kernel."""
    return scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=mask, scale=scale).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class _CuDNN(KernelFunctions):
    """PyTorch's cuDNN attention; PyTorch itself says what it supports."""

    def unsupported_reason(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
        if reason := super().unsupported_reason(query, key, value, mask):
            return reason
        if isinstance(query, FakeTensor):
            return "PyTorch has none for a mask" if mask is not None else ""
        params = torch.backends.cuda.SDPAParams(*heads_first(query, key, value), mask, 0.0, False, False)
        return (
            ""
            if torch.backends.cuda.can_use_cudnn_attention(params)
            else f"PyTorch has none for {_describe(query, mask)}"
        )


def _describe(query: Tensor, mask: Tensor | None) -> str:
    masked = "" if mask is None else f" and a {str(mask.dtype).removeprefix('torch.')} mask"
    return f"heads of {query.shape[-1]}{masked}"


def _sdpa_with(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    with sdpa_kernel(backend):
        return sdpa(q, k, v, mask, scale)


def _flash_full(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    if q.shape[-1] % 8:  # PyTorch pads such heads
        return _sdpa_with(SDPBackend.FLASH_ATTENTION, q, k, v, mask, scale)
    return _flash_block(q, k, v, scale)[0]


def _flash_block(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(*heads_first(q, k, v), 0.0, False, return_debug_mask=False, scale=scale)
    return out.transpose(1, 2), _lse(lse)


def _cudnn_full(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    if mask is not None:
        return _sdpa_with(SDPBackend.CUDNN_ATTENTION, q, k, v, mask, scale)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = cudnn(*heads_first(q, k, v), None, False, scale=scale)[0]
    return out.transpose(1, 2)


def _cudnn_block(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = cudnn(*heads_first(q, k, v), None, True, scale=scale)
    return out.transpose(1, 2), _lse(lse if lse.ndim == 3 else lse.squeeze(-1))  # 3 before PyTorch 2.9


def _package_full(package: str, function: str) -> FullAttention:
    def flash(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> Tensor:
        out: Tensor = getattr(_imported(package), function)(q, k, v, softmax_scale=scale)
        return out

    return flash


def _package_block(package: str, function: str) -> BlockAttention:
    def flash(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        out, lse, *_ = getattr(_imported(package), function)(q, k, v, softmax_scale=scale, return_attn_probs=True)
        return out, _lse(lse)

    return flash


def _flash_3_full(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> Tensor:
    """Calls FA3, whose versions differ in whether they give the log-sum-exp unasked."""
    out: Tensor = _flash_3_block(q, k, v, scale)[0]
    return out


def _sage(q: Tensor, k: Tensor, v: Tensor, scale: float | None, **options: Any) -> Any:
    q, k, v = (x.contiguous() for x in (q, k, v))  # reads other memory than it should through views (diffusers#13506)
    return _imported("sageattention").sageattn(q, k, v, tensor_layout="NHD", sm_scale=scale, **options)


def _sage_full(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> Tensor:
    out: Tensor = _sage(q, k, v, scale)
    return out


def _sage_block(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _sage(q, k, v, scale, return_lse=True)
    return out, _lse(lse)


def _lse(lse: Tensor) -> Tensor:
    """Turns [B, H, Sq] into [B, Sq, H, 1]."""
    return lse.transpose(1, 2).unsqueeze(-1)


_flash_3_block = _package_block("flash_attn_interface", "flash_attn_func")


def _functions(spec: AttentionKernel) -> tuple[FullAttention, BlockAttention | None]:
    if spec.function:
        return _package_full(spec.package, spec.function), _package_block(spec.package, spec.function)
    return _OWN_FUNCTIONS[spec.name]


_OWN_FUNCTIONS: dict[str, tuple[FullAttention, BlockAttention | None]] = {
    "_native_cudnn": (_cudnn_full, _cudnn_block),
    "_native_flash": (_flash_full, _flash_block),
    "_flash_3": (_flash_3_full, _flash_3_block),
    "sage": (_sage_full, _sage_block),
}
FUNCTIONS = {
    name: (_CuDNN if name == "_native_cudnn" else KernelFunctions)(spec=spec, full=full, block=block)
    for name, spec in KERNELS.items()
    for full, block in [_functions(spec)]
}
