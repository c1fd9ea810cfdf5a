"""What each rank does in the tests of compiled networks, in ComfyUI's python."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._dynamo.utils import counters

from parallel_runtime.architectures.network_modules import blocks_of
from parallel_runtime.engine.cuda_graphs import compile_blocks
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.specs import Compilation

from ..engine.meshes import mesh, parallelism
from .cases import error, forward, made, plan_of


def compiled(rank: int, world: int, name: str, ring: int, ulysses: int, backend: str) -> dict[str, Any]:
    """How far the compiled network on these degrees is from the plain one; graphs and their breaks, undivided too."""
    network, inputs = made(name)
    plain = forward(network, inputs)
    _, alone = _compiled(network, inputs, backend)
    parallelize(network, plan_of(network).plan, mesh(ring, ulysses), parallelism(ring, ulysses))
    try:
        out, together = _compiled(network, inputs, backend)
    finally:
        unparallelize(network)
    left = error(forward(network, inputs), plain)
    return {"error": error(out, plain), "left": left, "alone": alone, "together": together}


def _compiled(network: nn.Module, inputs: Any, backend: str) -> tuple[list[Tensor], dict[str, int]]:
    counters.clear()
    undo = compile_blocks(blocks_of(network, plan_of(network).plan, carrying=True), Compilation(backend=backend))
    try:
        out = forward(network, inputs)
    finally:
        undo()
    frames = counters["frames"]
    return out, {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "given up": frames["total"] - frames["ok"],
    }
