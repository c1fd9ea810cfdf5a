"""Attention on one device: `attend` for whole keys, `attend_block` with the log-sum-exp that merging blocks needs.

Tensors are [batch, tokens, heads, head_dim], of any strides with a contiguous last dim; keys and values may have fewer
heads, each for a group of neighbouring query heads. Knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...accelerators import ACCELERATORS
from ...specs import AttentionBackend
from .masks import additive
from .mesh import Axis
from .race import Sizes, blocks, timed, winner

# [B, Sq, H, D] of queries, keys and values, a bias, a scale; to an output and its log-sum-exp [B, Sq, H, 1].
BlockKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor]]

TAKE_MASKS = ("auto", "native", "_native_cudnn")
_CUDNN_LEADS = (9, 10)  # compute capabilities for which PyTorch itself prefers cuDNN
_NATIVE_BACKENDS = ("auto", "native")
_BACKENDS_OF_DIFFUSERS = {member.value: member for member in AttentionBackendName}
_FLASH_FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_MANY = 512  # tokens: with fewer, a kernel is over before a copy pays
_CHUNK = 1024  # queries whose scores are held at once
_BIAS_ALIGNMENT = 16  # the efficient kernel wants bias rows to start at a multiple of this many elements


def check_backend(backend: AttentionBackend, device: torch.device) -> None:
    """ValueError or RuntimeError if `backend` cannot run on `device` here, before anything is changed."""
    if backend in _NATIVE_BACKENDS:
        return
    if device.type == "cpu":
        raise ValueError(f'attention_backend {backend!r} needs a GPU; on the CPU use "auto" or "native"')
    attention_dispatch._check_attention_backend_requirements(_BACKENDS_OF_DIFFUSERS[backend])


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> Tensor:
    """Plain attention through diffusers' own backends. `mask`: [B, 1 or H, 1 or Sq, Sk], bool or additive.

    Backends that take no mask leave masked calls to scaled_dot_product_attention.
    """
    key, value = (for_heads(tensor, query.shape[2]) for tensor in (key, value))
    native = backend in _NATIVE_BACKENDS or (mask is not None and backend not in TAKE_MASKS)
    function = _AttentionBackendRegistry._backends[_BACKENDS_OF_DIFFUSERS["native" if native else backend]]
    if backend == "sage":  # reads other memory than it should through views (huggingface/diffusers#13506)
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    return function(query=query, key=key, value=value, attn_mask=mask, scale=scale)


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys: output [B, Sq, H, D] and its log-sum-exp [B, Sq, H, 1], float32.

    `mask` is [B, 1 or H, 1, Sk]. Where it hides the whole block the output is finite and its log-sum-exp hugely
    negative.
    """
    return attend_biased(query, key, value, None if mask is None else additive(mask, query.dtype), scale, backend)


def attend_biased(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, backend: AttentionBackend
) -> tuple[Tensor, Tensor]:
    """`attend_block` with its mask as a finite bias already."""
    key, value = for_heads(key, query.shape[2]), for_heads(value, query.shape[2])
    if query.device.type == "cpu":
        return _cpu(query, key, value, bias, scale)
    if query.device.type != "cuda":
        return _by_products(query, key, value, bias, scale)
    if bias is not None:
        return _efficient(query, key, value, bias, scale)
    if backend in _NATIVE_BACKENDS:
        backend = candidates(query)[0] if backend == "auto" else "native"
    return _BLOCK_KERNELS[backend](query, key, value, None, scale)


def candidates(query: Tensor) -> list[AttentionBackend]:
    """What "auto" may take for blocks of such queries, the likely fastest first; "native" where there is no choice."""
    found = ACCELERATORS.get(query.device.type)
    if found is None or not found.kernels or not _fits_flash(query):
        return ["native"]
    cudnn = torch.version.hip is None and torch.cuda.get_device_capability(query.device)[0] in _CUDNN_LEADS
    return [kernel for kernel in found.kernels if cudnn or kernel != "_native_cudnn"]


def raced(backend: AttentionBackend, query: Tensor, sizes: Sizes, axis: Axis, lanes: int = 1) -> AttentionBackend:
    """The backend for a ring's blocks: "auto" is decided by a race. Collective over `axis`.

    Of several `lanes` each would have a race of its own, and those that compute the same must not come to other bits:
    they take the likely winner.
    """
    if backend != "auto" or isinstance(query, FakeTensor):
        return backend
    names = candidates(query)[: 1 if lanes > 1 else None]

    def seconds(name: str) -> float:
        q, k = blocks(sizes, query.device)
        return timed(lambda: _BLOCK_KERNELS[name](q, k, k, None, None), query.device)

    return cast(AttentionBackend, winner(names, sizes, axis, seconds, query.device))


def for_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values of dim 2 repeated, so that each of `heads` query heads has its own."""
    return tensor if tensor.shape[2] == heads else tensor.repeat_interleave(heads // tensor.shape[2], dim=2)


def head_by_head(tensor: Tensor) -> Tensor:
    """Many tokens on the CPU with those of each head side by side: its kernel reads them again and again, by heads."""
    if tensor.device.type != "cpu" or tensor.shape[1] < _MANY:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _fits_flash(query: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    ampere = query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return half and ampere and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    q, k, v = (head_by_head(tensor) for tensor in (q, k, v))
    out, lse = _FLASH_FOR_CPU(*_heads_first(q, k, v), 0.0, False, attn_mask=bias, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


def _by_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Where no kernel is known to give a log-sum-exp: two matrix products a chunk of queries, in float32."""
    query, key, value = _heads_first(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, sums = [], []
    for chunk in query.split(_CHUNK, dim=2):
        scores = (chunk.float() * scale) @ key.float().transpose(-1, -2)
        scores = scores if bias is None else scores + bias
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append(((scores - lse).exp() @ value.float()).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2).transpose(1, 2), torch.cat(sums, 2).transpose(1, 2)


def _native_flash(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_rest = flash(*_heads_first(q, k, v), 0.0, False, return_debug_mask=False, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    if bias is not None:
        bias = _aligned(bias).expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_rest = efficient(*_heads_first(q, k, v), bias, True, 0.0, False, scale=scale)
    return out.transpose(1, 2), lse[..., : q.shape[1]].transpose(1, 2).unsqueeze(-1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    return _of_diffusers(attention_dispatch._cudnn_attention_forward_op, q, k, v, scale)


def _flash_2(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    return _of_diffusers(attention_dispatch._flash_attention_forward_op, q, k, v, scale)


def _flash_3(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = attention_dispatch._wrapped_flash_attn_3(q=q, k=k, v=v, softmax_scale=scale, causal=False)
    return out, lse.unsqueeze(-1)  # diffusers has turned it to [B, S, H]


def _sage(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    return _of_diffusers(attention_dispatch._sage_attention_forward_op, q, k, v, scale)


def _of_diffusers(
    forward_op: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """diffusers' forward ops give the log-sum-exp as [B, S, H], some with a trailing 1."""
    out, lse = forward_op(None, q, k, v, scale=scale, return_lse=True, _save_ctx=False)
    return out, lse if lse.ndim == 4 else lse.unsqueeze(-1)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _aligned(bias: Tensor) -> Tensor:
    keys = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, -keys % _BIAS_ALIGNMENT))[..., :keys]


def _native(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    return (_native_flash if _fits_flash(q) else _efficient)(q, k, v, None, scale)


_BLOCK_KERNELS: dict[str, BlockKernel] = {
    "native": _native,
    "_native_flash": _native_flash,
    "_native_cudnn": _cudnn,
    "flash": _flash_2,
    "_flash_3": _flash_3,
    "sage": _sage,
}
