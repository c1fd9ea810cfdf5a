"""A deal of the grid of samplers and schedulers; `python -m tests.comfyui.grid` runs all of it, and so does
CP_TEST_SWEEP=1."""

from __future__ import annotations

import os

import pytest

from .grid import Pair, all_pairs, compare, table
from .server import Server


@pytest.mark.parametrize("variant", ["2 workers", "2 workers, loaded"])
@pytest.mark.sweep
def test_samplers_with_schedulers_give_ksamplers_latent(server: Server, variant: str) -> None:
    rows = compare(server.client, dealt(all_pairs(server.client), variant), variants=[variant])
    assert all(row.equal for row in rows), "\n" + table([row for row in rows if not row.equal], [variant])


def dealt(pairs: list[Pair], variant: str) -> list[Pair]:
    """A third of the samplers, a sixth a way, with every scheduler in turn."""
    if os.environ.get("CP_TEST_SWEEP"):
        return pairs
    schedulers = len({scheduler for _, scheduler in pairs})
    samplers = [pairs[start : start + schedulers] for start in range(0, len(pairs), schedulers)]
    mine = samplers[variant == "2 workers, loaded" :: 6]
    return [of_one[index % schedulers] for index, of_one in enumerate(mine)]
