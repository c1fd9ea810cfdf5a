"""Cases in which ranks must refuse, clearly and all alike. Each returns the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import MagCacheConfig
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel_runtime.architectures.split_plan import ModulePlan, Split
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.for_diffusers import attach, detach
from parallel_runtime.for_diffusers.plans import plan_of

from .cases import run
from .meshes import mesh, parallelism
from .model_cases import output
from .reference import random_problem
from .tiny import build, inputs

RING = (2, 1)


def message(action: Callable[[], Any]) -> str:
    try:
        with torch.no_grad():
            action()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def attaching_twice(rank: int, world: int) -> str:
    transformer = _attached()
    return message(lambda: attach(transformer, mesh(*RING), parallelism(*RING)))


def detaching_what_is_not_attached(rank: int, world: int) -> str:
    return message(lambda: detach(build("flux")))


def unequal_lengths_of_a_stream(rank: int, world: int) -> str:
    made = inputs("flux")
    made["img_ids"] = made["img_ids"][:60]
    return message(lambda: output(_attached(), made))


def streams_that_no_plan_cuts(rank: int, world: int) -> str:
    return message(lambda: attach(build("wan"), mesh(*RING), parallelism(*RING), replicated=["text"]))


def processors_set_after_attach(rank: int, world: int) -> str:
    transformer = _attached()
    transformer.transformer_blocks[1].attn.set_processor(type(transformer.transformer_blocks[1].attn.processor)())
    return message(lambda: output(transformer, inputs("flux")))


def backend_set_after_attach(rank: int, world: int) -> str:
    transformer = _attached()
    transformer.transformer_blocks[0].attn.processor._attention_backend = AttentionBackendName.NATIVE
    return message(lambda: output(transformer, inputs("flux")))


def caches_that_compare_tokens(rank: int, world: int) -> str:
    transformer: Any = build("flux")
    transformer.enable_cache(FirstBlockCacheConfig(threshold=0.25))
    text = message(lambda: attach(transformer, mesh(*RING), parallelism(*RING)))
    transformer.disable_cache()
    attach(transformer, mesh(*RING), parallelism(*RING))
    return text


def caches_that_compare_tokens_after_attach(rank: int, world: int) -> str:
    transformer = _attached()
    transformer.enable_cache(FirstBlockCacheConfig(threshold=0.25))
    return message(lambda: output(transformer, inputs("flux")))


def caches_that_measure_tokens(rank: int, world: int) -> str:
    transformer: Any = build("flux")
    transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=4))
    return message(lambda: attach(transformer, mesh(*RING), parallelism(*RING)))


def processors_that_are_not_aware(rank: int, world: int) -> str:
    transformer: Any = build("sd3")
    transformer.fuse_qkv_projections()
    text = message(lambda: attach(transformer, mesh(*RING), parallelism(*RING)))
    assert not any(module._forward_pre_hooks for module in transformer.modules()), "something was changed"
    return text


def processors_that_are_half_aware(rank: int, world: int) -> str:
    transformer = build("flux")
    processor = FluxIPAdapterAttnProcessor(hidden_size=48, cross_attention_dim=32)
    transformer.transformer_blocks[0].attn.set_processor(processor)  # type: ignore[union-attr, index, operator]
    return message(lambda: attach(transformer, mesh(*RING), parallelism(*RING)))


def a_class_without_a_plan(rank: int, world: int) -> str:
    return message(lambda: attach(_Unknown(), mesh(*RING), parallelism(*RING)))


def a_plan_for_missing_modules(rank: int, world: int) -> str:
    transformer = build("flux")
    plan = replace(plan_of(transformer), module_plans=(ModulePlan("blocks", {"x": Split(("image",))}),))
    return message(lambda: attach(transformer, mesh(*RING), parallelism(*RING), plan))


def a_plan_for_missing_arguments(rank: int, world: int) -> str:
    transformer = build("flux")
    plan = replace(plan_of(transformer), module_plans=(ModulePlan("", {"latents": Split(("image",))}),))
    return message(lambda: attach(transformer, mesh(*RING), parallelism(*RING), plan))


def masks_between_video_tokens(rank: int, world: int) -> str:
    transformer: Any = build("ltx2")
    attach(transformer, mesh(*RING), parallelism(*RING))
    made = inputs("ltx2", masked=1)
    return message(lambda: output(transformer, made | {"video_self_attention_mask": torch.ones(1, 63, 63)}))


def masks_between_some_tokens(rank: int, world: int) -> str:
    problem = random_problem(1, masked=False)
    return message(lambda: run(problem, list(RING), torch.ones(1, 1, 5, 5, dtype=torch.bool), {}))


def masks_of_another_length(rank: int, world: int) -> str:
    return message(lambda: run(random_problem(1, masked=False), list(RING), torch.ones(1, 3, dtype=torch.bool), {}))


def degrees_that_are_not_the_groups(rank: int, world: int) -> str:
    return message(lambda: build_mesh(parallelism(2, 2)))


def degrees_that_are_not_the_meshs(rank: int, world: int) -> str:
    theirs = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    return message(lambda: attach(build("flux"), theirs, parallelism(2, 1)))


def degrees_that_are_not_our_meshs(rank: int, world: int) -> str:
    return message(lambda: attach(build("flux"), mesh(1, 2), parallelism(2, 1)))


def meshes_without_a_ring(rank: int, world: int) -> str:
    theirs = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    return message(lambda: attach(build("flux"), theirs, parallelism(1, 2)))


def backends_that_need_a_gpu(rank: int, world: int) -> str:
    return message(lambda: attach(build("flux"), mesh(*RING), parallelism(*RING, attention_backend="_native_flash")))


def training(rank: int, world: int) -> str:
    def forward() -> None:
        with torch.enable_grad():
            output(transformer, inputs("flux"))

    transformer = _attached()
    return message(forward)


def _attached() -> Any:
    transformer = build("flux")
    attach(transformer, mesh(*RING), parallelism(*RING))
    return transformer


class _Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
