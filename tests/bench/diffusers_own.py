"""diffusers' own context parallelism on the CPU, for comparison: without `enable_parallelism`, which divides by zero
there, and with a native op that returns the log-sum-exp that its ring needs. All of it is undone on leaving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def parallel(transformer: Any, mesh: DeviceMesh, ring: int, ulysses: int) -> Iterator[None]:
    context = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    apply_context_parallel(transformer, context, transformer._cp_plan)
    for processor in transformer.attn_processors.values():
        processor._parallel_config = config
    try:
        with log_sum_exp_on_the_cpu():
            yield
    finally:
        for processor in transformer.attn_processors.values():
            del processor._parallel_config
        remove_context_parallel(transformer, transformer._cp_plan)


@contextmanager
def log_sum_exp_on_the_cpu() -> Iterator[None]:
    native = attention_dispatch._native_attention_forward_op
    attention_dispatch._native_attention_forward_op = _with_lse
    try:
        yield
    finally:
        attention_dispatch._native_attention_forward_op = native


def _with_lse(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    _save_ctx: bool = True, _parallel_config: Any = None,
) -> Any:  # fmt: skip
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return (out.transpose(1, 2), lse.transpose(1, 2)) if return_lse else out.transpose(1, 2)
