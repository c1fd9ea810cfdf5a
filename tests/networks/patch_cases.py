"""What each rank does in the tests of patches, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from parallel_runtime.specs import Parallelism
from parallel_runtime.stages import counts_of, units_of
from parallel_runtime.worker.engine.divide import divide, patches_of, undivide
from parallel_runtime.worker.engine.patches import Patches
from parallel_runtime.worker.engine.stages import Stages, settle, unsettle

from .cases import digest, error, forward, made, plan_of
from .stage_cases import _deepen, mesh_of


@contextmanager
def in_patches(network: nn.Module, stages: int, patches: int, ulysses: int = 1) -> Iterator[tuple[Stages, Patches]]:
    known = plan_of(network)
    degrees = Parallelism(pipeline_degree=stages, ulysses_degree=ulysses, patches=patches)
    mesh, counts = mesh_of(degrees), counts_of(network, known, degrees)
    others = settle(network, known.plan, counts, mesh.pipeline.index)
    divide(network, known.plan, mesh, degrees)
    found = patches_of(network)
    assert found is not None
    cut = Stages(network, known.plan, mesh.pipeline, counts, found)
    try:
        yield cut, found
    finally:
        cut.remove()
        undivide(network)
        unsettle(others)


def same_input(rank: int, world: int, name: str, stages: int, patches: int, ulysses: int = 1) -> dict[str, Any]:
    """How far evaluations of one input are from the plain network: nothing is stale, if its keys are one step old."""
    network, inputs = made(name)
    _deepen(network, stages)
    plain = forward(network, inputs)
    with in_patches(network, stages, patches, ulysses) as (cut, found):
        first = forward(network, inputs)
        kept = found.kept_bytes
        alone = forward(network, inputs)
        together: list[Tensor] = []
        for _ in range(2):
            with cut.in_flight():
                together = cut.answers([x for _ in range(2) for x in forward(network, inputs)])
        grown = found.kept_bytes / max(1, kept)
    again = forward(network, inputs)
    return {
        "first": error(first, plain),
        "alone": error(alone, plain),
        "in flight": error(together, plain * 2),
        "left": error(again, plain),
        "bits": digest(alone),
        "kept": grown,
    }
