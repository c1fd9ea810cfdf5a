"""diffusers' own context parallelism, for comparison: a rank's share of its FLUX, as rank_share_cases.py has ours.

On the CPU `enable_parallelism` divides by zero, so what it does is done here, and undone on leaving; there the native
op is made to return the log-sum-exp that a ring needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel_runtime.commands.report import randomized

from .measuring import Case, Clock, Setting
from .rank_share_cases import WORLD_SIZES, fake_group

TINY = dict(num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=8, axes_dims_rope=[4, 6, 6],
            joint_attention_dim=32, pooled_projection_dim=32)  # fmt: skip


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    transformer, inputs = _flux(setting, device)
    clock = Clock(lambda: transformer(**inputs, return_dict=False)[0], device)
    yield Case({"what": "diffusers' FLUX", "degrees": "1 rank", "mode": "eager"}, clock.eager)
    for ranks in WORLD_SIZES:
        for words, ring, ulysses in ((f"Ulysses {ranks}", 1, ranks), (f"ring {ranks}", ranks, 1)):
            for backend in ("native",) if setting.tiny else ("native", "_native_flash"):
                labels = {"what": f"diffusers' FLUX, {backend}", "degrees": words, "mode": "eager"}
                yield Case(labels, clock.eager, within=partial(parallel, transformer, device, ring, ulysses, backend))


def _flux(setting: Setting, device: torch.device) -> tuple[Any, dict[str, Any]]:
    dtype, (image, text) = torch.bfloat16, (64, 8) if setting.tiny else (4096, 512)
    with torch.device(device):
        transformer: Any = FluxTransformer2DModel(guidance_embeds=True, **TINY if setting.tiny else {})
        transformer.to(dtype)
        config = transformer.config
        inputs = {
            "hidden_states": torch.randn(1, image, config.in_channels, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, dtype=dtype),
            "pooled_projections": torch.randn(1, config.pooled_projection_dim, dtype=dtype),
            "timestep": torch.full((1,), 0.5, dtype=dtype),
            "guidance": torch.full((1,), 3.5, dtype=dtype),
            "img_ids": torch.zeros(image, 3),
            "txt_ids": torch.zeros(text, 3),
        }
    return randomized(transformer), inputs


@contextmanager
def parallel(transformer: Any, device: torch.device, ring: int, ulysses: int, backend: str) -> Iterator[None]:
    """Has the transformer compute the first rank's share in this context."""
    with ExitStack() as undo:
        undo.enter_context(fake_group(ring * ulysses))
        mesh = init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        context = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)
        config = ParallelConfig(context_parallel_config=context)
        config.setup(dist.get_rank(), dist.get_world_size(), torch.device(mesh.device_type), mesh=mesh)
        transformer.set_attention_backend(backend)
        apply_context_parallel(transformer, context, transformer._cp_plan)
        undo.callback(remove_context_parallel, transformer, transformer._cp_plan)
        for processor in transformer.attn_processors.values():
            processor._parallel_config = config
            undo.callback(delattr, processor, "_parallel_config")
        if device.type == "cpu":
            undo.enter_context(log_sum_exp_on_the_cpu())
        yield


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
