"""Attention on one device: `attend` for full keys, `attend_block` with the log-sum-exp that merging blocks needs.

Tensors are [batch, tokens, heads, head_dim], of any strides with a contiguous last dim; keys and values may have fewer
heads, each for a group of neighbouring query heads. Knows no ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...accelerators import FALLBACK
from ...request import AttentionBackend
from .custom_op import attend_op, register
from .registry import FUNCTIONS, heads_first, sdpa

T = TypeVar("T")

_FLASH_FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_MIN_CONTIGUOUS_TOKENS = 512  # tokens: with fewer, a kernel is over before a copy pays
_CHUNK = 1024  # queries whose scores are in memory at once
_BIAS_ALIGNMENT = 16  # the efficient kernel wants bias rows to start at a multiple of this many elements
# What kernels raise for a call that they have nothing for; faults of the device are RuntimeErrors too.
NO_KERNEL = (RuntimeError, ValueError, TypeError, AssertionError)
FAULTS = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))  # since PyTorch 2.8

log = logging.getLogger(__name__)

_FAILURES: dict[Hashable, str] = {}  # by kind of call: why a backend has no kernel for it, "" where it has


def check_backend(backend: AttentionBackend, device: torch.device) -> None:
    """Raises ValueError if `backend` cannot run on `device` here."""
    if backend not in FUNCTIONS:
        return
    if device.type == "cpu":
        raise ValueError(f'attention_backend {backend!r} needs a GPU; on the CPU use "auto" or "native"')
    if reason := FUNCTIONS[backend].missing_reason:
        raise ValueError(f'attention_backend {backend!r} is not here: {reason}; use "auto"')


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> Tensor:
    """Attends with `mask` [B, 1 or H, 1 or Sq, Sk], bool or additive. Calls that `backend` does not support go to
    PyTorch's own choice, as with "native"."""
    if torch.compiler.is_compiling() and backend in FUNCTIONS:
        return attend_op(query, key, value, mask, scale, _OP_IDS[backend], [])
    out = try_kernel(query, key, value, mask, scale, backend)
    return attend_native(query, key, value, mask, scale) if out is None else out


_BY_BACKEND = {name: partial(attend, backend=name) for name in FUNCTIONS}
_OP_IDS = {name: register(function) for name, function in _BY_BACKEND.items()}


def attend_native(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Calls PyTorch's scaled_dot_product_attention, which supports every call."""
    return sdpa(query, repeat_kv(key, query.shape[2]), repeat_kv(value, query.shape[2]), mask, scale)


def try_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> Tensor | None:
    """Returns attention with the kernel of this name; None for calls that it does not support, which is logged once."""
    if backend in ("auto", FALLBACK):
        return None
    if backend == "native":
        return attend_native(query, key, value, mask, scale)
    kernel = FUNCTIONS[backend]
    key, value = (repeat_kv(tensor, query.shape[2]) for tensor in (key, value))
    return _try(
        (backend, "full", *_call_key(query, key, value, mask)),
        lambda: kernel.unsupported_reason(query, key, value, mask),
        lambda: kernel.full(query, key, value, mask, scale),
    )


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, backend: AttentionBackend
) -> tuple[Tensor, Tensor]:
    """Attends over one block of keys: returns the output [B, Sq, H, D] and its log-sum-exp [B, Sq, H, 1], float32.

    `bias` is [B, 1 or H, 1 or Sq, Sk], finite (see `masks.additive`). Where it hides the whole block the output is
    finite and its log-sum-exp hugely negative. What `backend` has no kernel for goes where it would with "native".
    """
    key, value = repeat_kv(key, query.shape[2]), repeat_kv(value, query.shape[2])
    if (kernel := FUNCTIONS.get(backend)) is not None:
        result = _try(
            (backend, "block", *_call_key(query, key, value, bias)),
            lambda: kernel.unsupported_reason(query, key, value, bias, with_lse=True),
            lambda: kernel.block(query, key, value, scale),
        )
        if result is not None:
            return result
    if query.device.type == "cpu":
        return _cpu(query, key, value, bias, scale)
    if query.device.type != "cuda":
        return _by_matmul(query, key, value, bias, scale)
    flash = FUNCTIONS["_native_flash"]
    if not flash.unsupported_reason(query, key, value, bias, with_lse=True):
        return flash.block(query, key, value, scale)
    return _efficient(query, key, value, bias, scale)


def repeat_kv(tensor: Tensor, heads: int) -> Tensor:
    """Repeats keys or values along dim 2, so that each of `heads` query heads has its own."""
    return tensor if tensor.shape[2] == heads else tensor.repeat_interleave(heads // tensor.shape[2], dim=2)


def contiguous_by_head(tensor: Tensor) -> Tensor:
    """Returns many tokens on the CPU with those of each head side by side: its kernel reads them again and again, by
    heads."""
    if tensor.device.type != "cpu" or tensor.shape[1] < _MIN_CONTIGUOUS_TOKENS:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def warn_once(backend: str, reason: str) -> None:
    """Logs on rank 0 that a backend is not used for some calls."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    log.warning(
        "[CP] attention_backend %s has no kernel for some calls: %s. Only these calls use the kernel that auto "
        "would choose",
        backend,
        reason,
    )


def _call_key(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Hashable, ...]:
    """Returns the properties of a call that decide whether a kernel supports it."""
    masked = None if mask is None else (mask.dtype, mask.shape)
    return query.device, query.dtype, key.dtype, query.shape, key.shape[1], value.shape[-1], masked


def _try(call: tuple[Any, ...], unsupported_reason: Callable[[], str], run: Callable[[], T]) -> T | None:
    """Returns the result of `run`, or None where the kernel does not support this kind of `call` (the backend is its
    first item). A kind is checked once: one that failed is not tried again, and one that succeeded is not checked
    again, also where nothing could be checked (in a graph)."""
    if call in _FAILURES:
        return None if _FAILURES[call] else run()
    reason, result = unsupported_reason(), None
    if not reason:
        try:
            result = run()
        except NO_KERNEL as error:
            if isinstance(error, FAULTS):
                raise
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    _FAILURES[call] = reason
    if reason:
        warn_once(call[0], reason)
    return result


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    q, k, v = (contiguous_by_head(tensor) for tensor in (q, k, v))
    out, lse = _FLASH_FOR_CPU(*heads_first(q, k, v), 0.0, False, attn_mask=bias, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


def _by_matmul(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attends without a kernel that returns a log-sum-exp, by matrix products by chunks of queries, in float32."""
    query, key, value = heads_first(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, sums = [], []
    start = 0
    for chunk in query.split(_CHUNK, dim=2):
        scores = (chunk.float() * scale) @ key.float().transpose(-1, -2)
        if bias is not None:
            scores = scores + (bias if bias.shape[2] == 1 else bias.narrow(2, start, chunk.shape[2]))
        start += chunk.shape[2]
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append(((scores - lse).exp() @ value.float()).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2).transpose(1, 2), torch.cat(sums, 2).transpose(1, 2)


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    if bias is not None:
        keys = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, -keys % _BIAS_ALIGNMENT))[..., :keys]
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(*heads_first(q, k, v), bias, True, 0.0, False, scale=scale)
    return out.transpose(1, 2), lse[..., : q.shape[1]].transpose(1, 2).unsqueeze(-1)
