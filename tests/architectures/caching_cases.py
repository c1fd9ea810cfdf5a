"""First-block caching on ComfyUI's networks, in ComfyUI's python: divided and not, the same evaluations are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from parallel_runtime.engine.comm.mesh import ContextMesh
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.worker.step_cache import StepCache

from ..engine.meshes import mesh, parallelism
from ..zoo.calls import Inputs
from .cases import error, forward, made, plan_of

STEPS = (1.0, 0.999, 0.5, 0.4995, 0.4993)


def cached(rank: int, world: int, name: str, ring: int, ulysses: int, shares: Sequence[int] = ()) -> dict[str, Any]:
    """Five evaluations, the third of which is far from the others."""
    network, inputs = made(name)
    alone, skipped = _run(network, inputs, ContextMesh())
    degrees = (ring, ulysses, 1, tuple(shares))
    parallelize(network, plan_of(network).plan, mesh(*degrees), parallelism(*degrees))
    together, skipped_together = _run(network, inputs, mesh(*degrees))
    unparallelize(network)
    errors = [error(got, want) for got, want in zip(together, alone, strict=True)]
    return {"skipped": skipped, "together": skipped_together, "error": max(errors)}


def replaced(rank: int, world: int) -> list[bool]:
    """Evaluations in which a block is left out skip nothing."""
    network, inputs = made("flux")
    leave_out = {"patches_replace": {"dit": {("double_block", 1): lambda arguments, _: arguments}}}
    cache = StepCache(network, plan_of(network).plan, ContextMesh(), 0.5)
    wants = forward(network, inputs, **leave_out)
    with cache.caching():
        for _ in range(2):
            with cache.branch("one"):
                got = forward(network, inputs, **leave_out)
    return [error(got, wants) == 0.0, cache.skipped == 0]


def unlike(rank: int, world: int) -> dict[str, Any]:
    """Ranks of which the last comes to other decisions, as cards of unlike kinds do at the threshold itself."""
    network, inputs = made("flux")
    degrees, place = (world, 1, 1, ()), mesh(world, 1)
    before, place.context.group_state.heterogeneous = place.context.group_state.heterogeneous, True
    parallelize(network, plan_of(network).plan, place, parallelism(*degrees))
    try:
        _, skipped = _run(network, inputs, place, 0.0 if rank == world - 1 else 0.05)
    finally:
        unparallelize(network)
        place.context.group_state.heterogeneous = before
    return {"skipped": skipped}


def _run(
    network: nn.Module, inputs: Inputs, place: ContextMesh, threshold: float = 0.05
) -> tuple[list[list[Tensor]], list[bool]]:
    cache = StepCache(network, plan_of(network).plan, place, threshold)
    outputs, skipped = [], []
    latent = "hidden_states" if "hidden_states" in inputs else "x"
    with cache.caching():
        for step in STEPS:
            before = cache.skipped
            with cache.branch("one"):
                outputs.append(forward(network, inputs | {latent: _scaled(inputs[latent], step)}))
            skipped.append(cache.skipped > before)
    return outputs, skipped


def _scaled(latent: Any, step: float) -> Any:
    return [_scaled(part, step) for part in latent] if isinstance(latent, list) else latent * step
