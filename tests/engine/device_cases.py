"""Cases that ranks run on what they say of their devices."""

from __future__ import annotations

import os

from parallel_runtime.worker.ranks import unlike


def unlike_kinds(rank: int, world: int, kinds: list[str]) -> bool:
    os.environ["WORLD_SIZE"] = str(world)
    return unlike(kinds[rank])
