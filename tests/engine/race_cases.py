"""Cases that ranks run on the race of kernels."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from parallel_runtime.worker.engine import race

from .meshes import mesh

_CPU = torch.device("cpu")


def winners(rank: int, world: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """The winner of kernels that take `times[name][rank]` seconds here, twice; how often one was timed; the results."""
    timed: list[str] = []

    def seconds(name: str) -> float:
        timed.append(name)
        return times[name][rank]

    sizes = race.Sizes(batch=1, queries=7, keys=9, heads=2, head_dim=64, dtype=torch.bfloat16)
    race._FOUND.clear()
    won = [race.winner(list(times), sizes, mesh(world, 1).context, seconds, _CPU) for _ in range(2)]
    return {"won": won, "timed": timed, "results": [list(astuple(found)) for found in race.results()]}
