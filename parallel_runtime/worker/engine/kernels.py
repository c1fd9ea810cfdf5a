"""Attention on one device: `attend` for whole keys, `attend_block` with the log-sum-exp that merging blocks needs.

Tensors are [batch, tokens, heads, head_dim], of any strides with a contiguous last dim; keys and values may have fewer
heads, each for a group of neighbouring query heads. Knows no ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...specs import AttentionBackend
from .opaque import attend_opaquely, enlist
from .operators import OPERATORS, by_pytorch, heads_first

Made = TypeVar("Made")

_FLASH_FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_MANY = 512  # tokens: with fewer, a kernel is over before a copy pays
_CHUNK = 1024  # queries whose scores are held at once
_BIAS_ALIGNMENT = 16  # the efficient kernel wants bias rows to start at a multiple of this many elements
# What kernels raise for a call that they have nothing for; faults of the device are RuntimeErrors too.
NO_KERNEL = (RuntimeError, ValueError, TypeError, AssertionError)
FAULTS = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))  # since PyTorch 2.8

log = logging.getLogger(__name__)

_TRIED: dict[Hashable, str] = {}  # by kind of call: why a backend has no kernel for it, "" where it has


def check_backend(backend: AttentionBackend, device: torch.device) -> None:
    """ValueError if `backend` cannot run on `device` here, before anything is changed."""
    if backend not in OPERATORS:
        return
    if device.type == "cpu":
        raise ValueError(f'attention_backend {backend!r} needs a GPU; on the CPU use "auto" or "native"')
    if why := OPERATORS[backend].missing:
        raise ValueError(f'attention_backend {backend!r} is not here: {why}; use "auto"')


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> Tensor:
    """Plain attention. `mask`: [B, 1 or H, 1 or Sq, Sk], bool or additive. What `backend` has no kernel for goes where
    it would with "auto": PyTorch's own choice."""
    if torch.compiler.is_compiling() and backend in OPERATORS:
        return attend_opaquely(query, key, value, mask, scale, _NUMBERS[backend], [])
    out = attempt(query, key, value, mask, scale, backend)
    return attend_natively(query, key, value, mask, scale) if out is None else out


def attend_natively(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """PyTorch's own choice, which has something for every call."""
    return by_pytorch(query, for_heads(key, query.shape[2]), for_heads(value, query.shape[2]), mask, scale)


def attempt(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> Tensor | None:
    """What the kernel of this name makes of a call; None where it has none, which the log says once."""
    if backend == "auto":
        return None
    if backend == "native":
        return attend_natively(query, key, value, mask, scale)
    operator = OPERATORS[backend]
    key, value = (for_heads(tensor, query.shape[2]) for tensor in (key, value))
    return _try(
        (backend, "whole", *_kind(query, key, value, mask)),
        lambda: operator.lacks(query, key, value, mask),
        lambda: operator.whole(query, key, value, mask, scale),
    )


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, backend: AttentionBackend
) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys: output [B, Sq, H, D] and its log-sum-exp [B, Sq, H, 1], float32.

    `bias` is [B, 1 or H, 1 or Sq, Sk], finite (see `masks.additive`). Where it hides the whole block the output is
    finite and its log-sum-exp hugely negative. What `backend` has no kernel for goes where it would with "auto".
    """
    key, value = for_heads(key, query.shape[2]), for_heads(value, query.shape[2])
    if (operator := OPERATORS.get(backend)) is not None:
        found = _try(
            (backend, "block", *_kind(query, key, value, bias)),
            lambda: operator.lacks(query, key, value, None) if bias is None else "it gives no log-sum-exp with a mask",
            lambda: operator.block(query, key, value, scale),
        )
        if found is not None:
            return found
    if query.device.type == "cpu":
        return _cpu(query, key, value, bias, scale)
    if query.device.type != "cuda":
        return _by_products(query, key, value, bias, scale)
    if bias is None and fits_flash(query):
        return OPERATORS["_native_flash"].block(query, key, value, scale)
    return _efficient(query, key, value, bias, scale)


def for_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values of dim 2 repeated, so that each of `heads` query heads has its own."""
    return tensor if tensor.shape[2] == heads else tensor.repeat_interleave(heads // tensor.shape[2], dim=2)


def head_by_head(tensor: Tensor) -> Tensor:
    """Many tokens on the CPU with those of each head side by side: its kernel reads them again and again, by heads."""
    if tensor.device.type != "cpu" or tensor.shape[1] < _MANY:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def fits_flash(query: Tensor) -> bool:
    """Does PyTorch's own flash kernel take such queries, and the keys and values that go with them?"""
    return query.shape[-1] % 8 == 0 and not OPERATORS["_native_flash"].lacks(query, query, query, None)


@cache
def tell_once(backend: str, why: str) -> None:
    """That a backend is not taken for some calls; by the first rank, for all of them."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    log.warning(
        "[CP] attention_backend %s has no kernel for some calls: %s. These go where auto would send them, all others "
        "go on with it",
        backend,
        why,
    )


_ATTENDING = {name: partial(attend, backend=cast(AttentionBackend, name)) for name in OPERATORS}
_NUMBERS = {name: enlist(attending) for name, attending in _ATTENDING.items()}


def _kind(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Hashable, ...]:
    """What kernels choose by, but for sizes that they all take."""
    masked = None if mask is None else (mask.dtype, mask.shape)
    return query.device, query.dtype, key.dtype, query.shape, key.shape[1], value.shape[-1], masked


def _try(call: tuple[Any, ...], lacks: Callable[[], str], run: Callable[[], Made]) -> Made | None:
    """What `run` makes, or None. Calls of a kind, `call` with the backend first, are looked into once: what failed then
    is not tried again, and who has attended once is trusted, also where nothing could be asked (in a graph)."""
    why = _TRIED.get(call)
    if why == "":
        return run()
    if why is None:
        why = lacks()
        if not why:
            try:
                made = run()
            except NO_KERNEL as error:
                if isinstance(error, FAULTS):
                    raise
                why = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            else:
                _TRIED[call] = ""
                return made
        _TRIED[call] = why
        tell_once(call[0], why)
    return None


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    q, k, v = (head_by_head(tensor) for tensor in (q, k, v))
    out, lse = _FLASH_FOR_CPU(*heads_first(q, k, v), 0.0, False, attn_mask=bias, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


def _by_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Where no kernel is known to give a log-sum-exp: two matrix products a chunk of queries, in float32."""
    query, key, value = heads_first(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, sums = [], []
    at = 0
    for chunk in query.split(_CHUNK, dim=2):
        scores = (chunk.float() * scale) @ key.float().transpose(-1, -2)
        if bias is not None:
            scores = scores + (bias if bias.shape[2] == 1 else bias.narrow(2, at, chunk.shape[2]))
        at += chunk.shape[2]
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
    out, lse, *_rest = efficient(*heads_first(q, k, v), bias, True, 0.0, False, scale=scale)
    return out.transpose(1, 2), lse[..., : q.shape[1]].transpose(1, 2).unsqueeze(-1)
