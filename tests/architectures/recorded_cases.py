"""Networks recorded by tape, in ComfyUI's python: replayed on other inputs they compute what they compute eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.engine import graph_runner
from parallel_runtime.engine.graph_runner import GraphRunner
from parallel_runtime.engine.parallelize import parallelize, unparallelize

from ..engine.meshes import mesh, parallelism
from ..site.tape import record_with_tapes
from ..zoo import tiny
from ..zoo.calls import Inputs
from .cases import CASES, copied, digest, made, plan_of

CPU = torch.device("cpu")


def replayed(rank: int, world: int, name: str, ring: int, ulysses: int, shares: Sequence[int] = ()) -> dict[str, Any]:
    """The bits of two inputs, eager and by replays, and what the recording says of itself."""
    network, first = made(name)
    tiny.seed(12)
    second = CASES[name].inputs()
    if world > 1:
        degrees = (ring, ulysses, 1, tuple(shares))
        parallelize(network, plan_of(network).plan, mesh(*degrees), parallelism(*degrees))
    try:
        eager = [bits(network, inputs) for inputs in (first, second)]
        record_with_tapes(graph_runner)
        recorded = GraphRunner(network, CPU)
        bits(network, first)  # eager
        bits(network, first)  # recorded
        return {
            "eager": eager,
            "replayed": [bits(network, inputs) for inputs in (first, second)],
            "replays": recorded.stats.replays,
            "reasons": recorded.stats.eager,
        }
    finally:
        network._compiled_call_impl = None
        if world > 1:
            unparallelize(network)


@torch.inference_mode()
def bits(network: nn.Module, inputs: Inputs) -> str:
    out = network(**copied(inputs), transformer_options={})
    return digest([out] if isinstance(out, Tensor) else list(out))
