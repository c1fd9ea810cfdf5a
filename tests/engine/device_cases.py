"""Cases that ranks run on what they say of their devices."""

from __future__ import annotations

import os

import torch

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
