"""Tests run side by side where there is room for it; on two cores what keeps no time runs beside the others."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from . import beside, cores

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("count", "gib", "jobs"), [(1, 64, 1), (2, 64, 1), (3, 64, 1), (4, 64, 2), (16, 64, 8), (16, 13, 2), (16, 1, 1)]
)
def test_each_pytest_has_two_cores_and_its_memory(count, gib, jobs):
    assert cores.side_by_side(count, gib) == jobs


def test_one_pytest_needs_no_plugin():
    assert cores.options(1) == []
    assert cores.options(2)[:2] == ["-n", "2"]


@pytest.mark.parametrize(("limit", "most"), [("100000 100000", 1), ("150000 100000", 1), ("max 100000", None)])
def test_a_containers_limit_counts(monkeypatch, tmp_path, limit, most):
    monkeypatch.setattr(cores, "LIMIT", tmp_path / "cpu.max")
    free = cores.cores_here()
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cores.cores_here() == (most or free)


@pytest.mark.parametrize(("count", "gib", "room"), [(1, 64, False), (2, 64, True), (3, 11, False), (4, 64, False)])
def test_what_keeps_no_time_runs_beside_the_others_on_two_cores(count, gib, room):
    assert cores.room_beside(count, gib) == room
    assert [path for path in beside.BESIDE if not (ROOT / path).exists()] == []


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


@pytest.mark.parametrize("codes", [(0, 0), (3, 0), (0, 3)])
def test_either_of_two_runs_fails_both_and_what_the_second_says_is_told(capfd, codes):
    first, second = (python(f"print('run {which}'); exit({code})") for which, code in enumerate(codes))
    assert beside.both(first, python("print('types')"), second) == max(codes)
    assert capfd.readouterr().out.splitlines() == ["run 0", "types", "run 1"]


def test_after_a_command_that_fails_none_of_its_run_follows(capfd):
    assert beside.both(python(""), python("exit(2)"), python("print('never')")) == 2
    assert capfd.readouterr().out == ""


def test_the_second_run_does_not_outlive_the_first_that_was_broken_off():
    started = time.monotonic()
    with pytest.raises(FileNotFoundError):
        beside.both(["/nowhere/pytest"], python("import time; time.sleep(60)"))
    assert time.monotonic() - started < 30
