"""Kernels of attention by name, as PyTorch and the packages flash_attn, flash_attn_interface (FA3) and sageattention
have them, and what each of them takes. Knows no ranks and no other way to attend.
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

# [B, tokens, heads, D] of queries, keys and values, a mask or bias, a scale; to an output of the queries' shape.
Whole = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]
# The same without a mask; to an output and its log-sum-exp [B, Sq, H, 1], float32.
Block = Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]

CUDNN_RECORDS = 91500  # below, what it computes in a CUDA graph may be wrong (NVIDIA/TransformerEngine#2344)
_HALF = (torch.float16, torch.bfloat16)
_OLDEST_GPU = (8, 0)  # its compute capability
_OLDEST = {"flash_attn": "2.6.3", "sageattention": "2.1.1"}


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A kernel for half precision on CUDA. `block` gives the log-sum-exp too. `dims` are the largest head size."""

    whole: Whole
    block: Block
    dims: int
    masks: bool = False
    package: str = ""

    @property
    def missing(self) -> str:
        """Why its package is of no use here; "" where it is, and where it needs none."""
        return missing(self.package) if self.package else ""

    def lacks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
        """Why it cannot attend to these; "" where nothing is known to speak against it."""
        if query.device.type != "cuda":
            return f"it needs a CUDA GPU, and the tensors are on {query.device.type}"
        if why := self.missing:
            return why
        if mask is not None and not self.masks:
            return "it takes no mask"
        if {query.dtype, key.dtype, value.dtype} not in ({half} for half in _HALF):
            return f"it takes bfloat16 or float16, not {str(query.dtype).removeprefix('torch.')}"
        if query.shape[-1] > self.dims or value.shape[-1] != query.shape[-1]:
            return f"it takes heads of up to {self.dims}, not of {query.shape[-1]}"
        if torch.cuda.get_device_capability(query.device) < _OLDEST_GPU:
            return "this GPU is too old for it"
        return ""


def missing(package: str) -> str:
    """Why this package is of no use here; "" where it is."""
    found = _imported(package)
    return found if isinstance(found, str) else ""


@cache
def _imported(package: str) -> Any:
    """The package, or why there is none. Several were built for one PyTorch only, and fail in another as they like."""
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as failed:
        return f"it needs the package {package}: {failed}"
    with suppress(importlib.metadata.PackageNotFoundError):
        if TorchVersion(importlib.metadata.version(package)) < (oldest := _OLDEST.get(package, "0")):
            return f"it needs {package} {oldest} or newer"
    return module


def cudnn_records() -> bool:
    """Is what cuDNN's attention computes in a CUDA graph right?"""
    return (torch.backends.cudnn.version() or 0) >= CUDNN_RECORDS


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, tokens, H, D] of each to [B, H, tokens, D], or back: views."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def by_pytorch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """PyTorch's own choice."""
    return scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=mask, scale=scale).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class _CuDNN(Operator):
    """PyTorch knows best what its own takes, and says so where there is a device to ask."""

    def lacks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
        if why := super().lacks(query, key, value, mask):
            return why
        if isinstance(query, FakeTensor):
            return "PyTorch has none for a mask" if mask is not None else ""
        asked = torch.backends.cuda.SDPAParams(*heads_first(query, key, value), mask, 0.0, False, False)
        return "" if torch.backends.cuda.can_use_cudnn_attention(asked) else f"PyTorch has none for {_of(query, mask)}"


def _of(query: Tensor, mask: Tensor | None) -> str:
    masked = "" if mask is None else f" and a {str(mask.dtype).removeprefix('torch.')} mask"
    return f"heads of {query.shape[-1]}{masked}"


def _chosen(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    with sdpa_kernel(backend):
        return by_pytorch(q, k, v, mask, scale)


def _flash_whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    if q.shape[-1] % 8:  # PyTorch pads such heads
        return _chosen(SDPBackend.FLASH_ATTENTION, q, k, v, mask, scale)
    return _flash_block(q, k, v, scale)[0]


def _flash_block(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(*heads_first(q, k, v), 0.0, False, return_debug_mask=False, scale=scale)
    return out.transpose(1, 2), _lse(lse)


def _cudnn_whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    if mask is not None:
        return _chosen(SDPBackend.CUDNN_ATTENTION, q, k, v, mask, scale)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = cudnn(*heads_first(q, k, v), None, False, scale=scale)[0]
    return out.transpose(1, 2)


def _cudnn_block(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = cudnn(*heads_first(q, k, v), None, True, scale=scale)
    return out.transpose(1, 2), _lse(lse if lse.ndim == 3 else lse.squeeze(-1))  # 3 before PyTorch 2.9


def _package_whole(package: str) -> Whole:
    def flash(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> Tensor:
        out: Tensor = _imported(package).flash_attn_func(q, k, v, softmax_scale=scale)
        return out

    return flash


def _package_block(package: str) -> Block:
    def flash(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _imported(package).flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=True)
        return out, _lse(lse)

    return flash


def _flash_3_whole(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> Tensor:
    """Versions differ in whether they give the log-sum-exp unasked."""
    out: Tensor = _flash_3_block(q, k, v, scale)[0]
    return out


def _sage(q: Tensor, k: Tensor, v: Tensor, scale: float | None, **options: Any) -> Any:
    q, k, v = (x.contiguous() for x in (q, k, v))  # reads other memory than it should through views (diffusers#13506)
    return _imported("sageattention").sageattn(q, k, v, tensor_layout="NHD", sm_scale=scale, **options)


def _sage_whole(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> Tensor:
    out: Tensor = _sage(q, k, v, scale)
    return out


def _sage_block(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _sage(q, k, v, scale, return_lse=True)
    return out, _lse(lse)


def _lse(lse: Tensor) -> Tensor:
    """[B, H, Sq] to [B, Sq, H, 1]."""
    return lse.transpose(1, 2).unsqueeze(-1)


_flash_3_block = _package_block("flash_attn_interface")

OPERATORS: dict[str, Operator] = {
    "_native_flash": Operator(whole=_flash_whole, block=_flash_block, dims=256),
    "_native_cudnn": _CuDNN(whole=_cudnn_whole, block=_cudnn_block, dims=256, masks=True),
    "flash": Operator(
        whole=_package_whole("flash_attn"), block=_package_block("flash_attn"), dims=256, package="flash_attn"
    ),
    "_flash_3": Operator(whole=_flash_3_whole, block=_flash_3_block, dims=256, package="flash_attn_interface"),
    "sage": Operator(whole=_sage_whole, block=_sage_block, dims=128, package="sageattention"),
}
