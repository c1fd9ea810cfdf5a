"""Cases that ranks run on what they say of their devices."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.comm.votes import differing_ranks
from parallel_runtime.errors import Refused
from parallel_runtime.jobs import DemoJob
from parallel_runtime.specs import ModelSpec, Parallelism, WeightPlacement
from parallel_runtime.wire.messages import Run
from parallel_runtime.worker.batch_groups import broadcast_from_first
from parallel_runtime.worker.models import Model, Models

from ..groups import flux_job
from .meshes import mesh


def unlike_kinds(rank: int, world: int, kinds: list[str]) -> bool:
    os.environ["WORLD_SIZE"] = str(world)
    return bool(differing_ranks(kinds[rank]))


def rounded(rank: int, world: int, degrees: list[int], unlike: bool) -> list[list[float]]:
    """What each has of two tensors after an evaluation, whose last digits are each rank's own."""
    context = mesh(*degrees).context
    context.group_state.heterogeneous = unlike
    try:
        full = torch.arange(6.0).view(3, 2) + rank * 1e-6
        return [part.flatten().tolist() for part in broadcast_from_first(context, [full, full[:1]])]
    finally:
        context.group_state.heterogeneous = False


def loaded_by_one(rank: int, world: int) -> tuple[str, int]:
    """Why a model is refused that one rank of these could load, and how many models a rank has then."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}

    def load(spec: ModelSpec, *_: object) -> Model:
        if rank:
            raise Refused("no such file here")
        return Model(spec, torch.nn.Linear(2, 2))

    models, message = Models(torch.device("cpu"), {DemoJob: load}), "nothing"
    try:
        models.get(Run(1, ModelSpec(loader="tests"), Parallelism(), WeightPlacement()), lambda share: None, flux_job())
    except Refused as refused:
        message = str(refused)
    return message, len(models.loaded)


def tried_degrees(rank: int, world: int, all_degrees: list[dict[str, int]]) -> tuple[list[float], bool]:
    """What the ranks of a sequence sum up to over the weights' own group with one set of degrees after another, while
    a second model keeps its own; and whether that one's group still works."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}

    class Unsplit(Model):
        def split(self, parallelism: Parallelism) -> None:
            pass

        def place_weights(self, placement: object) -> None:
            pass

    models = Models(torch.device("cpu"), {DemoJob: lambda spec, *_: Unsplit(spec, torch.nn.Linear(2, 2))})
    shard = WeightPlacement(mode="shard")

    def used(name: str, degrees: dict[str, int]) -> Unsplit:
        return models.get(Run(1, ModelSpec(loader=name), Parallelism(**degrees), shard), lambda _: None, flux_job())

    def summed(dim: MeshDim) -> float:
        total = torch.ones(1)
        dist.all_reduce(total, group=dim.group)
        return float(total)

    kept = used("kept", all_degrees[-1])
    sums = []
    for degrees in all_degrees * 2:
        used("tried", degrees)
        sums.append(summed(models._shard_dims[Parallelism(**degrees).mesh_shape]))
    return sums, summed(kept.mesh.context) == kept.mesh.context.size
