"""Benchmarks the attentions of a worker that has full sequences, and logs which other kernel would be faster.

It changes nothing: such a worker keeps ComfyUI's own kernels and bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..engine.comm.mesh import MeshDim
from ..engine.kernels.autotune import AttentionSizes, faster_kernel
from ..engine.kernels.registry import heads_first
from .models import Model

MIN_TOKENS = 1024  # tokens

log = logging.getLogger(__name__)


def kernel_advice(model: Model, x: Tensor) -> AbstractContextManager[Any]:
    """Returns the context for an evaluation of `model` on `x`. It benchmarks the first one of each spec and shape where
    this rank has full sequences and ComfyUI chooses the kernels."""
    evaluation = model.spec, x.shape
    chosen_by_us = model.parallelism.splits_tokens or model.attention or model.compilation
    if chosen_by_us or x.device.type == "cpu" or evaluation in model.benchmarked:
        return nullcontext()
    model.benchmarked.add(evaluation)
    return BenchmarkMode(model.mesh.context)


class BenchmarkMode(TorchFunctionMode):
    """Benchmarks kernels for large attentions without a mask, each size once. `dim` has this rank alone."""

    def __init__(self, dim: MeshDim) -> None:
        super().__init__()
        self._dim = dim

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and len(args) >= 3 and _plain(args[3:], kwargs):
            _benchmark(self._dim, *args[:3])
        return func(*args, **kwargs)


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call has no mask, dropout, causality or scale."""
    return not any(isinstance(value, Tensor) or value for value in (*args, *kwargs.values()))


def _benchmark(dim: MeshDim, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Logs a kernel that is faster than ComfyUI's on tensors of these sizes [B, heads, tokens, D]."""
    if min(query.shape[2], key.shape[2]) < MIN_TOKENS or query.shape[1] != key.shape[1]:
        return
    sizes = AttentionSizes(
        batch=query.shape[0],
        queries=query.shape[2],
        keys=key.shape[2],
        heads=query.shape[1],
        head_dim=query.shape[3],
        dtype=query.dtype,
        what="alone",
    )
    faster = faster_kernel(query.transpose(1, 2), _comfyui_kernel, sizes, dim)
    if faster and faster not in dim.group_state.advised:
        dim.group_state.advised.add(faster)
        log.warning(
            "[CP] attention of %s is faster with %s than with ComfyUI's own kernel, but differs in the last bits: set "
            "attention_backend to %s in CP Parallel Config to use it",
            sizes,
            faster,
            faster,
        )


def _comfyui_kernel(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, __: float | None) -> Tensor:
    """Calls PyTorch's attention as ComfyUI did, inside the same contexts."""
    return scaled_dot_product_attention(*heads_first(q, k, v)).transpose(1, 2)
