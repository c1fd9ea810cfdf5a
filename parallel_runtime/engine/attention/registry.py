"""The function of every kernel in accelerators.KERNELS, as PyTorch and its packages have it. Knows no ranks."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...accelerators import KERNELS, AttentionKernel

# [B, tokens, heads, D] of queries, keys and values, a mask or bias, a scale; to an output of the queries' shape.
FullAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]
# Takes these and whether to return the log-sum-exp [B, heads, queries], float32, too. It may return one unasked.
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None, bool], tuple[Tensor, Tensor | None]]

CUDNN_GRAPHS_VERSION = 91500  # below, what it computes in a CUDA graph may be wrong (NVIDIA/TransformerEngine#2344)
_HALF = (torch.float16, torch.bfloat16)
_OLDEST_GPU = (8, 0)  # its compute capability


@dataclass(frozen=True, kw_only=True)
class KernelFunction:
    """A kernel's row of KERNELS with its function."""

    spec: AttentionKernel
    function: AttentionFunction

    def full(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        return self.function(query, key, value, mask, scale, False)[0]

    def block(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Returns the output and its log-sum-exp [B, Sq, H, 1], float32."""
        out, lse = self.function(query, key, value, None, scale, True)
        assert lse is not None, self.spec.name
        return out, lse.transpose(1, 2).unsqueeze(-1)

    @property
    def missing_reason(self) -> str:
        """Returns why it cannot be used here on any tensor: its package or cuDNN is missing. "" if it can."""
        if self.spec.cudnn and torch.version.hip is not None:
            return "ROCm has no cuDNN"
        if not self.spec.package:
            return ""
        if not self.spec.new_enough:
            return f"it needs {self.spec.package} {self.spec.min_version} or newer"
        return package_missing_reason(self.spec.package, self.spec.function)

    def unusable_reason(self, *tensors: Tensor) -> str:
        """Returns why the kernel takes nothing of the device, dtypes and head sizes of `tensors`; "" if no reason is
        known. Ranks on equal GPUs get the same answer, however many tokens each has."""
        device, dtype, size = tensors[0].device, tensors[0].dtype, tensors[0].shape[-1]
        if device.type not in self.spec.devices:
            return f"it needs a {' / '.join(self.spec.devices).upper()} GPU, and the tensors are on {device.type}"
        if reason := self.missing_reason:
            return reason
        if {tensor.dtype for tensor in tensors} not in ({half} for half in _HALF):
            return f"it takes bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
        if size > self.spec.max_head_dim or any(tensor.shape[-1] != size for tensor in tensors):
            return f"it takes heads of up to {self.spec.max_head_dim}, not of {size}"
        if size % self.spec.head_multiple:
            return f"it takes heads of a multiple of {self.spec.head_multiple}, not of {size}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST_GPU:
            return "this GPU is too old for it"
        return ""

    def unsupported_reason(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, with_lse: bool = False
    ) -> str:
        """Returns why the kernel does not take these, `with_lse` with their log-sum-exp; "" if no reason is known."""
        if with_lse and mask is not None:
            return "it gives no log-sum-exp with a mask"
        if reason := self.unusable_reason(query, key, value):
            return reason
        if mask is not None and not self.spec.masks:
            return "it takes no mask"
        if not self.spec.cudnn:
            return ""
        if isinstance(query, FakeTensor):
            return "PyTorch has none for a mask" if mask is not None else ""
        params = torch.backends.cuda.SDPAParams(*heads_first(query, key, value), mask, 0.0, False, False)
        if torch.backends.cuda.can_use_cudnn_attention(params):
            return ""
        masked = "" if mask is None else f" and a {str(mask.dtype).removeprefix('torch.')} mask"
        return f"PyTorch has none for heads of {query.shape[-1]}{masked}"


def package_missing_reason(package: str, function: str = "") -> str:
    """Returns why the package, or this function of it, cannot be used; "" if it can."""
    package_or_reason = _imported(package)
    if isinstance(package_or_reason, str):
        return package_or_reason
    return f"{package} has no {function}" if function and not hasattr(package_or_reason, function) else ""


@cache
def _imported(package: str) -> Any:
    """Returns the package, or why there is none. Wheels built for another PyTorch raise any of these errors."""
    try:
        return importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        return f"it needs the package {package}: {error}"


def cudnn_supports_graphs() -> bool:
    """Returns whether cuDNN's attention computes correctly in a CUDA graph."""
    return (torch.backends.cudnn.version() or 0) >= CUDNN_GRAPHS_VERSION


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turns each [B, tokens, H, D] into [B, H, tokens, D], or back: views."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Calls PyTorch's scaled_dot_product_attention with its own choice of kernel."""
    return scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=mask, scale=scale).transpose(1, 2)


def _native_cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if mask is not None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(q, k, v, mask, scale), None
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = cudnn(*heads_first(q, k, v), None, with_lse, scale=scale)[:2]
    return out.transpose(1, 2), lse.squeeze(-1) if with_lse and lse.ndim == 4 else lse  # 4 since PyTorch 2.9


def _native_flash(
    q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None, __: bool
) -> tuple[Tensor, Tensor | None]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = flash(*heads_first(q, k, v), 0.0, False, return_debug_mask=False, scale=scale)[:2]
    return out.transpose(1, 2), lse


def _sage(
    q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (x.contiguous() for x in (q, k, v))  # reads other memory than it should through views (diffusers#13506)
    sage = _imported("sageattention").sageattn
    result: Any = sage(q, k, v, tensor_layout="NHD", sm_scale=scale, return_lse=with_lse)
    return result if with_lse else (result, None)


def _flash_of_package(
    spec: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None, __: bool
) -> tuple[Tensor, Tensor | None]:
    """Calls a package's function that takes what flash_attn_func takes. Asks for the log-sum-exp always: it costs
    nothing, and versions of FA3 differ in whether they give it unasked."""
    function = getattr(_imported(spec.package), spec.function)
    out, lse = function(q, k, v, softmax_scale=scale, return_attn_probs=True)[:2]
    return out, lse


# A kernel whose package has no function that is called like flash_attn_func has its own here. Where packs' code names
# the package, it is in LIBRARIES of loading/code_names.py too.
_OWN: dict[str, AttentionFunction] = {"_native_cudnn": _native_cudnn, "_native_flash": _native_flash, "sage": _sage}
FUNCTIONS = {
    name: KernelFunction(spec=spec, function=partial(_flash_of_package, spec) if spec.function else _OWN[name])
    for name, spec in KERNELS.items()
}
