"""What each rank does in the tests of pipelines, in ComfyUI's python."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures import Architecture
from parallel_runtime.architectures.network_modules import units_of, weight_bytes
from parallel_runtime.engine.comm.mesh import ContextMesh, build_mesh
from parallel_runtime.engine.stages import PlaceholderBlock, Stages
from parallel_runtime.errors import Refused
from parallel_runtime.specs import Parallelism

from .cases import Inputs, digest, error, forward, made, plan_of

_MESHES: dict[tuple[int, ...], ContextMesh] = {}


def parity(rank: int, world: int, name: str, stages: int, ulysses: int = 1, flights: int = 3) -> dict[str, Any]:
    """How far a network in stages is from the plain one: one forward at a time, by who handles an exception of its own
    meanwhile, and several in flight; and what this rank holds of its blocks."""
    network, inputs = made(name)
    deepen(network, stages)
    plan, units = plan_of(network).plan, units_of(network, plan_of(network).plan)
    plain, full = forward(network, inputs), weight_bytes(network)
    blocks = sum(weight_bytes(seat.block) for unit in units for seat in unit)
    degrees = Parallelism(pipeline_degree=stages, ulysses_degree=ulysses)
    mesh = mesh_of(degrees)
    cut = Stages(network, plan, mesh, degrees)
    kept_bytes = weight_bytes(network)
    try:
        raise LookupError
    except LookupError:
        alone = forward(network, inputs)
    with cut.in_flight():
        together = cut.share_outputs([x for _ in range(flights) for x in forward(network, inputs)])
    cut.close()
    again = forward(network, inputs)
    return {
        "alone": error(alone, plain),
        "in flight": error(together, plain * flights),
        "left": error(again, plain),
        "bits": digest(alone),
        "held": (kept_bytes - (full - blocks)) / blocks,
        "given": cut.channel.sent_bytes,
        "peers": mesh.pipeline.ranks,
    }


def deepen(network: nn.Module, stages: int) -> None:
    """Blocks for so many stages: the smallest networks have two."""
    while 0 < len(units := units_of(network, plan_of(network).plan)) < stages:
        (seat, *_) = units[-1]
        if isinstance(seat.stack, nn.ModuleList):
            seat.stack.append(deepcopy(seat.stack[0]))
        else:
            seat.stack[f"block{len(seat.stack)}"] = deepcopy(next(iter(seat.stack.values())))


def mesh_of(degrees: Parallelism) -> ContextMesh:
    if degrees.mesh_shape not in _MESHES:
        _MESHES[degrees.mesh_shape] = build_mesh(degrees)
    return _MESHES[degrees.mesh_shape]


def refusal(rank: int, world: int, name: str) -> str:
    """Why a network is not split into stages."""
    try:
        parity(rank, world, name, world)
    except (Refused, ValueError) as refused:
        return str(refused)
    return ""


def refused_by_one(rank: int, world: int, name: str) -> dict[str, Any]:
    """The second stage refuses the second of three forwards in flight: what each says, and its next forward's error."""
    network, inputs = made(name)
    plan, plain = plan_of(network), forward(network, inputs)
    degrees = Parallelism(pipeline_degree=world)
    cut, calls = Stages(network, plan.plan, mesh_of(degrees), degrees), []

    def once(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Refused("no more")

    if rank == 1:
        blocks = (seat.block for unit in units_of(network, plan.plan) for seat in unit)
        next(block for block in blocks if not isinstance(block, PlaceholderBlock)).register_forward_pre_hook(once)
    message = "nothing"
    try:
        with cut.in_flight():
            cut.share_outputs([x for _ in range(3) for x in forward(network, inputs)])
    except Refused as refused:
        message = str(refused)
    return {"said": message, "error": error(forward(network, inputs), plain)}


def with_nan(rank: int, world: int, name: str) -> list[bool]:
    """Are the outputs in stages, alone and in flight, the plain network's, of which the second entry has NaN?"""
    network, inputs = made(name)
    inputs["context"][1, 0] = torch.nan
    want = forward(network, inputs)
    assert want[0][1].isnan().all()
    assert not want[0][0].isnan().any()
    degrees = Parallelism(pipeline_degree=world)
    cut = Stages(network, plan_of(network).plan, mesh_of(degrees), degrees)
    alone = forward(network, inputs)
    with cut.in_flight():
        together = cut.share_outputs(forward(network, inputs))
    return [all(map(partial(torch.allclose, equal_nan=True), got, want)) for got in (alone, together)]


LOUD = (ValueError, RuntimeError, TypeError)


def with_one_word_less(rank: int, world: int, name: str) -> dict[str, Any]:
    """{the word that was dropped: how wrong the result is, or "refused"}, of the words that say what blocks give."""
    network, inputs = made(name)
    known, plain = plan_of(network), forward(network, inputs)
    answer: dict[str, Any] = {}
    for number, site in enumerate(known.plan.module_plans):
        for word in [word for word in ("updates", "runs_with") if getattr(site, word) is not None]:
            sites = (
                *known.plan.module_plans[:number],
                replace(site, **{word: None}),
                *known.plan.module_plans[number + 1 :],
            )
            plan = replace(known.plan, module_plans=sites)
            answer[f"{site.name} {word}"] = _in_two(network, replace(known, plan=plan), inputs, plain, rank)
    return answer


def _in_two(network: nn.Module, known: Architecture, inputs: Inputs, plain: list[Tensor], rank: int) -> float | str:
    degrees = Parallelism(pipeline_degree=2)
    cut = Stages(network, known.plan, mesh_of(degrees), degrees)
    try:
        return error(forward(network, inputs), plain)
    except LOUD:
        return "refused"
    finally:
        cut.close()
