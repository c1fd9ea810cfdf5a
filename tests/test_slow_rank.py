"""A rank whose blocks take twice as long, in real workers: after two runs it has a third of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_runtime.host.cost import Figures
from parallel_runtime.host.group import Result, WorkerGroup
from parallel_runtime.specs import ModelSpec, Parallelism

from .groups import flux_job, on_cpu, sabotage, spec_of
from .tiny import write

RING = Parallelism(ring_degree=2)
WORK = Figures(name="tiny", heads=2, layers=4, width=64, weights=1, weight_bytes=4, item_bytes=4).work(1, 100)


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return spec_of(write(tmp_path, "flux_schnell"))


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    sabotage(monkeypatch, "0 tokens pace;1 tokens slow")
    with WorkerGroup(on_cpu(RING)) as group:
        yield group


def run(group: WorkerGroup, model: ModelSpec) -> Result:
    return group.run(model, group.balanced(model, RING, WORK), flux_job(steps=2, size=(12, 8), tokens=6))


def test_a_rank_of_half_the_speed_has_a_third_after_two_runs(slowed: WorkerGroup, model: ModelSpec) -> None:
    before = run(slowed, model)
    assert slowed.balanced(model, RING, WORK).shares == (), "one run may be chance"
    run(slowed, model)
    fast, slow = slowed.balanced(model, RING, WORK).shares
    assert slow / (fast + slow) == pytest.approx(1 / 3, abs=0.06)  # how long a step takes is in tests/bench/shares.py
    after = run(slowed, model)
    got, want = (result.value["samples"] for result in (after, before))
    assert (got - want).abs().max() < 2e-5 * want.std()
