"""A world of one rank: no process group, and diffusers' own bits."""

from __future__ import annotations

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName

from parallel_runtime.specs import Parallelism
from parallel_runtime.worker.engine.attach import attach, detach, from_context_parallel_config
from parallel_runtime.worker.engine.mesh import build_mesh

from .tiny import build, inputs


@torch.no_grad()
@pytest.mark.parametrize("kind", ["flux", "qwen", "wan", "ltx"])
def test_one_rank_gives_the_same_bits(kind: str) -> None:
    transformer = build(kind)
    reference = transformer(**inputs(kind), return_dict=False)[0]
    attach(transformer, None, Parallelism())
    assert torch.equal(transformer(**inputs(kind), return_dict=False)[0], reference)
    with pytest.raises(ValueError, match="attached already"):
        attach(transformer, build_mesh(Parallelism()), Parallelism())
    detach(transformer)


def test_the_backend_is_set_per_transformer_and_taken_back() -> None:
    transformer, other = build("wan"), build("wan")
    processor = transformer.blocks[0].attn1.processor  # type: ignore[union-attr, index]
    attach(transformer, None, Parallelism(attention_backend="native"))
    assert processor._attention_backend == AttentionBackendName.NATIVE
    assert other.blocks[0].attn1.processor._attention_backend is None  # type: ignore[union-attr, index]
    detach(transformer)
    assert "_attention_backend" not in vars(processor)


def test_several_ranks_without_a_process_group_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 ranks, but there is no process group; launch with torchrun"):
        build_mesh(Parallelism(ulysses_degree=2))


def test_a_diffusers_config_is_understood() -> None:
    config = ContextParallelConfig(ulysses_degree=4, ulysses_anything=True, convert_to_fp32=False)
    expected = Parallelism(ulysses_degree=4, rotate_method="allgather", convert_to_fp32=False)
    assert from_context_parallel_config(config) == expected
