"""Cases in which ranks ask each other for what only one of them knows."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import torch

from parallel_runtime.engine import weight_sources
from parallel_runtime.engine.comm.collectives import (
    all_gather_int,
    all_gather_ints,
    any_rank,
    differing_ranks,
    refuse_on_all_ranks,
)
from parallel_runtime.engine.weight_sources import FlatBlock, HostWeights
from parallel_runtime.errors import Refused

from .meshes import mesh


def votes(rank: int, world: int, speaker: int) -> dict[str, bool]:
    """Who hears that `speaker` says yes: its ring, its Ulysses group, all."""
    os.environ["WORLD_SIZE"] = str(world)
    mesh_dims, flag = mesh(2, world // 2), rank == speaker
    return {"ring": any_rank(flag, mesh_dims.ring), "ulysses": any_rank(flag, mesh_dims.ulysses), "all": any_rank(flag)}


def numbers(rank: int, world: int) -> list[object]:
    os.environ["WORLD_SIZE"] = str(world)
    large = (1 << 62) + rank
    data = b"of rank 2" if rank == 2 else b"of the others"
    ring = all_gather_ints([rank, large], mesh(2, world // 2).ring)
    return [all_gather_int(large), ring, differing_ranks(data)]


def refusals(rank: int, world: int) -> list[str]:
    """What each rank is refused with where rank 1 refuses: among the ranks of its ring alone."""
    try:
        with refuse_on_all_ranks(mesh(2, world // 2).ring):
            if rank == 1:
                raise Refused("file.gone", path="x")
    except Refused as refused:
        return [refused.code]
    return []


def waiting(rank: int, world: int) -> list[bool]:
    """Is a vote's waiting counted? Before a transfer that the host could see, and after."""
    context = mesh(1, world).context
    context.group_state.waited_seconds = None
    any_rank(False, context)
    before = context.group_state.waited_seconds
    context.group_state.waited_seconds = 0.0
    any_rank(False, context)
    return [before is not None, context.group_state.waited_seconds > 0]


def mapped_late(rank: int, world: int) -> list[float]:
    """Weights in main memory where rank 1 is slow to map them, and rank 0 closes its own as soon as it has."""
    os.environ["WORLD_SIZE"] = str(world)
    layer = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    weights, block = HostWeights(torch.device("cpu"), range(world), rank, staged=False), FlatBlock(layer)
    weights.store(block, torch.empty(0, dtype=torch.uint8))
    map_file = weight_sources._map_file

    def slowly(file: int, size: int) -> torch.Tensor:
        time.sleep(0.5 * rank)
        return map_file(file, size)

    with patch.object(weight_sources, "_map_file", slowly):
        (part,) = weights.seal()
    if rank == 0:
        weights.close()
    return part.view(torch.float32)[:3].tolist()
