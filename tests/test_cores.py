"""Tests run side by side where there is room for it, and never on two cores."""

from __future__ import annotations

import pytest

from . import cores


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
    free = cores.usable_cores()
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cores.usable_cores() == (most or free)
