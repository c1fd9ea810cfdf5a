"""What the table of plans promises: by its own estimate auto is never slower than one GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .plans import MACHINES, WORKS, Machine, compared, rows


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_no_work_is_slower_than_on_the_fastest_gpu_alone(machine: Machine, recorded: bool) -> None:
    for name, work in WORKS.items():
        plan, alone = compared(machine, replace(work, recorded=recorded))
        assert plan.seconds <= 1.05 * alone, name


def test_on_fast_links_a_video_is_split_by_heads_and_not_in_a_ring() -> None:
    h100 = next(machine for machine in MACHINES if machine.name.startswith("8 x H100"))
    for name in ("Wan 480p", "Wan 720p"):
        degrees = compared(h100, WORKS[name])[0].degrees
        assert (degrees.cfg_degree, degrees.ulysses_degree, degrees.ring_degree) == (2, 4, 1)


def test_the_results_have_the_table() -> None:
    assert "\n".join(rows(recorded=False)) in (Path(__file__).parent / "RESULTS.md").read_text(encoding="utf-8")
