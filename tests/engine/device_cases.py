"""Cases that ranks run on what they say of their devices."""

from __future__ import annotations

import os

import torch

from parallel_runtime.worker.lanes import from_the_first
from parallel_runtime.worker.ranks import unlike

from .meshes import mesh


def unlike_kinds(rank: int, world: int, kinds: list[str]) -> bool:
    os.environ["WORLD_SIZE"] = str(world)
    return unlike(kinds[rank])


def rounded(rank: int, world: int, degrees: list[int], unlike: bool) -> list[list[float]]:
    """What each has of two tensors after an evaluation, whose last digits are each rank's own."""
    context = mesh(*degrees).context
    context.world.unlike = unlike
    try:
        whole = torch.arange(6.0).view(3, 2) + rank * 1e-6
        return [part.flatten().tolist() for part in from_the_first(context, [whole, whole[:1]])]
    finally:
        context.world.unlike = False
