"""Plans with one word less, in ComfyUI's python: what such a plan lets through must still be right.

Each rank first runs it without a word to the other: one that raised alone would let its peer wait. What neither refuses
they run together, and compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_runtime.architectures.split_plan import ModulePlan, SplitPlan
from parallel_runtime.engine.attention import attention_override
from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.comm.mesh import ContextMesh, MeshDim
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.engine.split import splitter

from ..engine.meshes import mesh, parallelism
from ..zoo.calls import Inputs
from .cases import error, forward, made, plan_of

LOUD = (ValueError, RuntimeError, TypeError, AttributeError, IndexError, KeyError, AssertionError)


def survivors(rank: int, world: int, name: str) -> dict[str, Any]:
    """{what was dropped: how wrong the result is} of all that was not refused, and how many were."""
    assert world == 2
    network, inputs = made(name)
    plan, wants = plan_of(network).plan, forward(network, inputs)
    assert not _refuses(network, plan, inputs), "the plan itself is refused"
    fewer = dict(mutants(plan))
    quiet = {what: mutant for what, mutant in fewer.items() if not _refuses(network, mutant, inputs)}
    return {
        "refused": len(fewer) - len(quiet),
        "let through": {what: _wrong(network, mutant, inputs, wants) for what, mutant in quiet.items()},
    }


def mutants(plan: SplitPlan) -> Iterator[tuple[str, SplitPlan]]:
    for number, site in enumerate(plan.module_plans):
        before, after = plan.module_plans[:number], plan.module_plans[number + 1 :]
        for what, sites in [(site.name, ()), *((f"{site.name}: {what}", (fewer,)) for what, fewer in _fewer(site))]:
            try:
                yield what, replace(plan, module_plans=(*before, *sites, *after))
            except ValueError:  # it is no plan at all
                continue
    for name in plan.no_options:
        yield name, replace(plan, no_options=tuple(other for other in plan.no_options if other != name))
    for stream in plan.replicated:
        yield f"{stream} whole", replace(plan, replicated=plan.replicated - {stream})
    for kind in plan.residuals:
        yield f"{kind} residuals", replace(plan, residuals=tuple(other for other in plan.residuals if other != kind))


def _fewer(site: ModulePlan) -> Iterator[tuple[str, ModulePlan]]:
    for name in (
        name for name in site.args if name not in (site.updates or ())
    ):  # what a block gives must be named: else it is no plan at all
        yield f"args {name}", replace(site, args={key: word for key, word in site.args.items() if key != name})
    for name in site.submodule_attends:
        yield (
            f"within {name}",
            replace(site, submodule_attends={key: over for key, over in site.submodule_attends.items() if key != name}),
        )
    for name in site.unsplit_args:
        yield f"whole {name}", replace(site, unsplit_args=tuple(other for other in site.unsplit_args if other != name))
    if site.attends is not None:
        yield "attends", replace(site, attends=None)
    if site.frames is not None:
        yield "frames", replace(site, frames=None)
    if site.gathers:
        yield "gathers", replace(site, gathers=False)


def _wrong(network: nn.Module, plan: SplitPlan, inputs: Inputs, wants: list[Tensor]) -> float:
    parallelize(network, plan, mesh(2, 1), parallelism(2, 1))
    try:
        return error(forward(network, inputs), wants)
    finally:
        unparallelize(network)


def _refuses(network: nn.Module, plan: SplitPlan, inputs: Inputs) -> bool:
    kept = splitter.all_gather_v, attention_override.ContextAttention
    splitter.all_gather_v, attention_override.ContextAttention = _gather, _Alone  # type: ignore[assignment, misc]
    try:
        mine: list[bool] = [False, False]
        dist.all_gather_object(mine, _raises(network, plan, inputs, dist.get_rank()))
        return any(mine)
    finally:
        splitter.all_gather_v, attention_override.ContextAttention = kept  # type: ignore[misc]


def _raises(network: nn.Module, plan: SplitPlan, inputs: Inputs, index: int) -> bool:
    mesh_dim = MeshDim(size=2, index=index, ranks=(0, 1))
    try:
        parallelize(network, plan, ContextMesh(context=mesh_dim, ring=mesh_dim), parallelism(2, 1))
    except LOUD:
        return True
    try:
        forward(network, inputs)
    except LOUD:
        return True
    finally:
        unparallelize(network)
    return False


class _Alone(ContextAttention):
    """Attends to this rank's own tokens."""

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        if mask is not None and mask.shape[2] == 1:
            assert mask.shape[-1] in (key.shape[1], self.streams.total(self.key_streams))
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def _gather(own: Tensor, sizes: Sequence[int], mesh_dim: MeshDim, dim: int) -> Tensor:
    own = own.movedim(dim, 0)
    others = [own.new_zeros(size, *own.shape[1:]) for size in sizes]
    return torch.cat([*others[: mesh_dim.index], own, *others[mesh_dim.index + 1 :]]).movedim(0, dim)
