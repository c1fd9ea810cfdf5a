"""A world of one rank: no process group, and diffusers' own bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention

from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.for_diffusers import attach, detach, from_context_parallel_config
from parallel_runtime.for_diffusers.attaching import aware, backend_name
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import Parallelism

from .tiny import build, inputs


@torch.no_grad()
@pytest.mark.parametrize("kind", ["flux", "qwen", "wan", "ltx", "sd3_dual", "lumina2", "hunyuan15", "ltx2"])
def test_one_rank_gives_the_same_bits(kind: str) -> None:
    transformer = build(kind)
    reference = transformer(**inputs(kind), return_dict=False)[0]
    attach(transformer, None, Parallelism())
    assert torch.equal(transformer(**inputs(kind), return_dict=False)[0], reference)
    with pytest.raises(ValueError, match="attached already"):
        attach(transformer, build_mesh(Parallelism()), Parallelism())
    detach(transformer)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sd3", "sd3_dual", "lumina2"])
def test_processors_of_ours_give_the_bits_of_those_they_replace(kind: str, dtype: torch.dtype) -> None:
    transformer = build(kind).to(dtype)
    made = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs(kind, batch=2).items()}
    reference = transformer(**made, return_dict=False)[0]
    attentions = [module for module in transformer.modules() if isinstance(module, Attention)]
    for module in attentions:
        theirs, module.processor = module.processor, aware(module.processor)
        assert module.processor is not theirs
    assert torch.equal(transformer(**made, return_dict=False)[0], reference)


def test_the_backend_is_set_per_transformer_and_taken_back() -> None:
    transformer, other = build("wan"), build("wan")
    processor = transformer.blocks[0].attn1.processor  # type: ignore[union-attr, index]
    attach(transformer, None, Parallelism(options=EngineOptions(attention_backend="native")))
    assert processor._attention_backend == AttentionBackendName.NATIVE
    assert other.blocks[0].attn1.processor._attention_backend is None  # type: ignore[union-attr, index]
    detach(transformer)
    assert "_attention_backend" not in vars(processor)


def test_the_backend_reaches_processors_that_know_none() -> None:
    transformer: Any = build("lumina2")
    attention = transformer.context_refiner[0].attn
    theirs = attention.processor
    attach(transformer, None, Parallelism(options=EngineOptions(attention_backend="native")))
    assert attention.processor._attention_backend == backend_name("native")
    detach(transformer)
    assert attention.processor is theirs


def test_several_ranks_without_a_process_group_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 ranks, but there is no process group; launch with torchrun"):
        build_mesh(Parallelism(ulysses_degree=2))


def test_a_diffusers_config_is_understood() -> None:
    config = ContextParallelConfig(ulysses_degree=4, ulysses_anything=True, convert_to_fp32=False)
    expected = Parallelism(ulysses_degree=4, options=EngineOptions(rotate_method="allgather", convert_to_fp32=False))
    assert from_context_parallel_config(config) == expected
