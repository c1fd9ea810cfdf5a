"""Cases that ranks run on transformers whose blocks are compiled, and on an attention that a graph calls."""

from __future__ import annotations

import torch
import torch._dynamo  # before ranks are forked, and not in each of them
from torch import Tensor, nn

from parallel_runtime.engine.cuda_graphs import compile_blocks
from parallel_runtime.for_diffusers import attach
from parallel_runtime.specs import Compilation

from .cases import together
from .meshes import mesh, parallelism
from .model_cases import error, output
from .reference import random_problem
from .tiny import build, inputs


@torch.no_grad()
def compiled_error(rank: int, world: int, kind: str, degrees: list[int], backend: str) -> list[float]:
    """How far blocks that are a graph each, without a break, are from eager ones; and what is eager again."""
    transformer, made = build(kind), inputs(kind)
    attach(transformer, mesh(*degrees), parallelism(*degrees))
    eager = output(transformer, made)
    torch.compiler.reset()
    stacks = [module for module in transformer.children() if isinstance(module, nn.ModuleList)]
    undo = compile_blocks([block for stack in stacks for block in stack], Compilation(backend=backend, fullgraph=True))
    errors = [error(output(transformer, made), eager)]
    undo()
    assert not any("forward" in vars(block) for stack in stacks for block in stack)
    return [*errors, error(output(transformer, made), eager)]


@torch.no_grad()
def in_one_graph(rank: int, world: int, degrees: list[int], masked: bool) -> list[float]:
    """Errors of a graph around an attention, as it was captured and as it was lowered."""
    place, problem = mesh(*degrees), random_problem(9, masked=False)
    attend_together = together(problem, place, parallelism(*degrees))
    tokens = attend_together.streams.local_tokens(("text", "image")).size
    q, k, v = (torch.randn(1, tokens, 4, 8) for _ in range(3))
    mask = torch.rand(1, tokens) < 0.7 if masked else None

    def around(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return attend_together(query * 2, key, value, mask).flatten(2) + 1

    expected = around(q, k, v, mask)
    torch.compiler.reset()
    compiled = [torch.compile(around, backend=backend, fullgraph=True) for backend in ("eager", "aot_eager")]
    return [error(call(q, k, v, mask), expected) for call in compiled]
