"""Which kernel a ring takes is measured once, and is the same on all ranks."""

from __future__ import annotations

from .conftest import Groups

CASES = "tests.engine.race_cases"


def test_the_kernel_whose_slowest_rank_is_fastest_wins_on_every_rank(groups: Groups) -> None:
    times = {"slow here and there": [4e-6, 5e-6], "even": [3e-6, 3e-6], "fast on one rank only": [1e-6, 9e-6]}
    for answer in groups(2).run(f"{CASES}:winners", times=times):
        assert answer["won"] == ["even", "even"]
        assert answer["timed"] == list(times)  # once
        assert answer["results"] == [
            ["7 queries x 9 keys, 2 heads of 64, bfloat16", ["even", *list(times)[::2]], [3.0, 5.0, 9.0]]
        ]


def test_one_kernel_alone_is_not_raced(groups: Groups) -> None:
    for answer in groups(2).run(f"{CASES}:winners", times={"only": [1.0, 1.0]}):
        assert answer == {"won": ["only", "only"], "timed": [], "results": []}
