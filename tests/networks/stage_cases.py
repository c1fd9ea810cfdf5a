"""What each rank does in the tests of pipelines, in ComfyUI's python."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from parallel_runtime.errors import Refused
from parallel_runtime.networks import Network
from parallel_runtime.specs import Parallelism
from parallel_runtime.stages import counts_of, units_of
from parallel_runtime.worker.engine.divide import divide, undivide
from parallel_runtime.worker.engine.mesh import ContextMesh, build_mesh
from parallel_runtime.worker.engine.stages import Elsewhere, Stages, settle, unsettle
from parallel_runtime.worker.weights.store import weight_bytes

from .cases import Inputs, digest, error, forward, made, plan_of

_MESHES: dict[tuple[int, ...], ContextMesh] = {}


def parity(rank: int, world: int, name: str, stages: int, ulysses: int = 1, flights: int = 3) -> dict[str, Any]:
    """How far a network in stages is from the plain one: one forward at a time, and several in flight; and what this
    rank holds of its blocks."""
    network, inputs = made(name)
    deepen(network, stages)
    plan, units = plan_of(network).plan, units_of(network, plan_of(network).plan)
    plain, whole = forward(network, inputs), weight_bytes(network)
    blocks = sum(weight_bytes(seat.block) for unit in units for seat in unit)
    degrees = Parallelism(pipeline_degree=stages, ulysses_degree=ulysses)
    mesh = mesh_of(degrees)
    counts = counts_of(network, plan_of(network), degrees)
    others = settle(network, plan, counts, mesh.pipeline.index)
    held = weight_bytes(network)
    if ulysses > 1:
        divide(network, plan, mesh, degrees)
    cut = Stages(network, plan, mesh.pipeline, counts)
    alone = forward(network, inputs)
    with cut.in_flight():
        together = cut.answers([x for _ in range(flights) for x in forward(network, inputs)])
    cut.remove()
    if ulysses > 1:
        undivide(network)
    unsettle(others)
    again = forward(network, inputs)
    return {
        "alone": error(alone, plain),
        "in flight": error(together, plain * flights),
        "left": error(again, plain),
        "bits": digest(alone),
        "held": (held - (whole - blocks)) / blocks,
        "given": cut.passing.given_bytes,
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
    if degrees.dims not in _MESHES:
        _MESHES[degrees.dims] = build_mesh(degrees)
    return _MESHES[degrees.dims]


def refusal(rank: int, world: int, name: str) -> str:
    """Why a network is not cut into stages."""
    try:
        parity(rank, world, name, world)
    except Refused as refused:
        return str(refused)
    return ""


def refused_by_one(rank: int, world: int, name: str) -> dict[str, Any]:
    """The second stage refuses the second of three forwards in flight: what each says, and its next forward's error."""
    network, inputs = made(name)
    plan, plain = plan_of(network), forward(network, inputs)
    degrees = Parallelism(pipeline_degree=world)
    counts, axis = counts_of(network, plan, degrees), mesh_of(degrees).pipeline
    settle(network, plan.plan, counts, rank)
    cut, calls = Stages(network, plan.plan, axis, counts), []

    def once(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Refused("no more")

    if rank == 1:
        blocks = (seat.block for unit in units_of(network, plan.plan) for seat in unit)
        next(block for block in blocks if not isinstance(block, Elsewhere)).register_forward_pre_hook(once)
    said = "nothing"
    try:
        with cut.in_flight():
            cut.answers([x for _ in range(3) for x in forward(network, inputs)])
    except Refused as refused:
        said = str(refused)
    return {"said": said, "error": error(forward(network, inputs), plain)}


LOUD = (ValueError, RuntimeError, TypeError)


def with_one_word_less(rank: int, world: int, name: str) -> dict[str, Any]:
    """{the word that was dropped: how wrong the result is, or "refused"}, of the words that say what blocks give."""
    network, inputs = made(name)
    known, plain = plan_of(network), forward(network, inputs)
    answer: dict[str, Any] = {}
    for number, site in enumerate(known.plan.sites):
        for word in [word for word in ("gives", "beside") if getattr(site, word) is not None]:
            sites = (*known.plan.sites[:number], replace(site, **{word: None}), *known.plan.sites[number + 1 :])
            plan = replace(known.plan, sites=sites)
            answer[f"{site.name} {word}"] = _in_two(network, replace(known, plan=plan), inputs, plain, rank)
    return answer


def _in_two(network: nn.Module, known: Network, inputs: Inputs, plain: list[Tensor], rank: int) -> float | str:
    degrees = Parallelism(pipeline_degree=2)
    counts = counts_of(network, known, degrees)
    others = settle(network, known.plan, counts, rank)
    cut = Stages(network, known.plan, mesh_of(degrees).pipeline, counts)
    try:
        return error(forward(network, inputs), plain)
    except LOUD:
        return "refused"
    finally:
        cut.remove()
        unsettle(others)
