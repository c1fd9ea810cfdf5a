"""A rank whose blocks take twice as long, in real workers: after two runs it has a third of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime.group.worker_group import Result, WorkerGroup
from parallel_runtime.specs import ModelSpec, Parallelism

from ..groups import flux_job, on_cpu, sabotage, spec_of
from ..zoo.checkpoints import write

RING = Parallelism(ring_degree=2)


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return spec_of(write(tmp_path, "flux_schnell"))


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    sabotage(monkeypatch, "0 tokens pace;1 tokens slow")
    with WorkerGroup(on_cpu(RING)) as group:
        yield group


def balanced(group: WorkerGroup, model: ModelSpec) -> Parallelism:
    """The degrees of the next run, which begins."""
    degrees = replace(RING, shares=group.balance.shares(model).get(RING, ()))
    group.balance.begin(model, degrees)
    return degrees


def run(group: WorkerGroup, model: ModelSpec) -> Result:
    return group.run(model, balanced(group, model), flux_job(steps=2, size=(12, 8), tokens=6))


@pytest.mark.sweep
def test_a_rank_of_half_the_speed_has_a_third_after_two_runs(slowed: WorkerGroup, model: ModelSpec) -> None:
    before = run(slowed, model)
    assert balanced(slowed, model).shares == (), "one run may be chance"
    run(slowed, model)
    fast, slow = balanced(slowed, model).shares
    assert slow / (fast + slow) == pytest.approx(1 / 3, abs=0.06)  # how long a step takes is in tests/bench/shares.py
    after = run(slowed, model)
    got, want = (result.value["samples"] for result in (after, before))
    assert (got - want).abs().max() < 2e-5 * want.std()
