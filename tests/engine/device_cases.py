"""Cases that ranks run on what they say of their devices."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from parallel_runtime.engine.comm.collectives import differing_ranks
from parallel_runtime.engine.comm.mesh import GroupState, MeshDim
from parallel_runtime.errors import Refused
from parallel_runtime.jobs import DemoJob
from parallel_runtime.specs import ModelSpec, Parallelism, WeightPlacement
from parallel_runtime.wire.messages import Run
from parallel_runtime.worker import batch_groups
from parallel_runtime.worker.batch_groups import FUNCTIONS, SamplerNoise, broadcast_if_unlike
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
        return [part.flatten().tolist() for part in broadcast_if_unlike(context, [full, full[:1]])]
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


class UnlikeCard(TorchFunctionMode):
    """Draws as a CUDA GPU of so many threads does: a thread of Philox has four numbers, and a larger tensor starts anew
    with the next thread's (pytorch#196613). The CPU's generator stands in for Philox."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = function(*args, **(kwargs or {}))
        if function not in FUNCTIONS:
            return drawn
        generator = torch.Generator().manual_seed(7)
        by_component = torch.randn(-(-drawn.numel() // self._threads), 1 << 18, generator=generator)
        place = torch.arange(drawn.numel())
        return drawn.copy_(by_component[place // self._threads, place % self._threads].view_as(drawn))


def drawn_by_unlike_cards(
    rank: int, world: int, threads: list[int], kinds: list[str], comfyui: str, side: int
) -> tuple[list[list[float]], list[bool]]:
    """The first and last numbers of what each rank draws in several ways; whether the network's own, drawn meanwhile,
    and those drawn by CPU generators of unlike cards stayed its own."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    state, device = GroupState(heterogeneous=len(set(kinds)) > 1), torch.device("cpu")
    with patch.object(batch_groups, "generator_kind", lambda _: kinds[rank]):
        noise = SamplerNoise(device, comfyui, state)
        latent = torch.zeros(1, 16, side, side)
        with UnlikeCard(threads[rank]):
            own = torch.randn_like(latent)
            with noise:
                seeded = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
                drawn = [seeded, torch.randn_like(latent), torch.empty_like(latent).normal_()]
                with noise.paused():
                    in_network = torch.randn_like(latent)
    return [[*each.flatten()[-4:].tolist()] for each in drawn], [torch.equal(in_network, own)]
