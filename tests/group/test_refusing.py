"""A refusal is an answer: the sentence alone, and the group and its models stay. What one rank alone refuses in the
middle of an exchange still ends the group. Real processes, CPU and gloo, no ComfyUI."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parallel_runtime.errors import Refused, WorkerFailed
from parallel_runtime.group import worker_group as group_module
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ModelSpec, Parallelism

from ..groups import Stop, flux_job, models_of, on_cpu, our_processes, sabotage, samples, spec_of, workers_of
from ..zoo.checkpoints import write

ULYSSES, RING = Parallelism(ulysses_degree=2), Parallelism(ring_degree=2)
PROMPTS, ROWS = Parallelism(cfg_degree=2), Parallelism(data_degree=2)
SENTENCE = r"^sabotage cannot be honoured; leave it$"
JOB: dict[str, Any] = {"size": (7, 11), "tokens": 5, "negative_tokens": 2, "batch": 2}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


@pytest.fixture(scope="module")
def untouched() -> Iterator[WorkerGroup]:
    with WorkerGroup(on_cpu(ULYSSES)) as group:
        yield group


@pytest.fixture(scope="module")
def fresh(untouched: WorkerGroup, flux: ModelSpec) -> dict[Parallelism, torch.Tensor]:
    """What a group that has refused nothing makes of the job."""
    return {degrees: samples(untouched, flux, degrees, **JOB) for degrees in (ULYSSES, RING, PROMPTS, ROWS)}


def refused(group: WorkerGroup, model: ModelSpec, degrees: Parallelism, says: str = SENTENCE) -> None:
    with pytest.raises(Refused, match=says):
        group.run(model, degrees, flux_job(**JOB))
    assert group.alive
    assert group.activity.now.state == "idle"


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("degrees", [PROMPTS, RING, ULYSSES, ROWS], ids=["prompts", "ring", "ulysses", "rows"])
def test_what_all_ranks_refuse_is_said_and_the_next_run_is_as_from_fresh_workers(
    monkeypatch: pytest.MonkeyPatch, flux: ModelSpec, fresh: dict[Parallelism, torch.Tensor], degrees: Parallelism
) -> None:
    places = ("evaluation", "gather", "step")  # each the first time that a run comes by
    sabotage(monkeypatch, ";".join(f"{rank} {place} refuse" for place in places for rank in (0, 1)))
    with WorkerGroup(on_cpu(degrees)) as group:
        pids = workers_of(group)
        for _ in places:
            refused(group, flux, degrees)
        assert models_of(group) == [{flux.fingerprint}] * 2
        assert torch.equal(samples(group, flux, degrees, **JOB), fresh[degrees])
        for others, want in fresh.items():
            assert torch.equal(samples(group, flux, others, **JOB), want)
        assert workers_of(group) == pids


@pytest.mark.parametrize(
    ("fault", "degrees"),
    [
        pytest.param("1 load refuse", ULYSSES, id="while loading"),
        pytest.param("1 evaluation refuse", PROMPTS, id="a group of prompts"),
        pytest.param("0 evaluation refuse", PROMPTS, id="the other group", marks=pytest.mark.sweep),
    ],
)
def test_what_one_refuses_where_none_waits_for_it_all_refuse(
    monkeypatch: pytest.MonkeyPatch,
    flux: ModelSpec,
    fresh: dict[Parallelism, torch.Tensor],
    fault: str,
    degrees: Parallelism,
) -> None:
    sabotage(monkeypatch, fault)
    with WorkerGroup(on_cpu(degrees)) as group:
        started = time.monotonic()
        refused(group, flux, degrees)
        assert time.monotonic() - started < 5
        assert torch.equal(samples(group, flux, degrees, **JOB), fresh[degrees])
        assert torch.equal(samples(group, flux, ULYSSES, **JOB), fresh[ULYSSES])


def test_what_one_refuses_in_the_middle_of_an_exchange_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, flux: ModelSpec
) -> None:
    monkeypatch.setattr(group_module, "CANCEL_SECONDS", 1.0)
    sabotage(monkeypatch, "1 evaluation refuse")
    with WorkerGroup(on_cpu(ULYSSES)) as group:
        pids = workers_of(group)
        started = time.monotonic()
        failure = (
            r"worker rank 1 \(cpu\) failed: Refused: sabotage cannot be honoured; leave it "
            r"\(worker rank 0 \(cpu\) did not refuse"
        )
        with pytest.raises(WorkerFailed, match=failure):
            group.run(flux, ULYSSES, flux_job(**JOB))
        assert time.monotonic() - started < 6
        assert not group.alive
        assert not our_processes().keys() & {*pids}
        with pytest.raises(WorkerFailed, match=failure):
            samples(group, flux, ULYSSES)


@pytest.mark.sweep
def test_lanes_of_several_ranks_of_which_one_refuses_alone_end_too(
    monkeypatch: pytest.MonkeyPatch, flux: ModelSpec
) -> None:
    monkeypatch.setattr(group_module, "CANCEL_SECONDS", 1.0)
    sabotage(monkeypatch, "3 evaluation refuse")
    both = Parallelism(cfg_degree=2, ulysses_degree=2)
    with WorkerGroup(on_cpu(both)) as group:
        with pytest.raises(WorkerFailed, match=r"Refused: sabotage cannot be honoured; leave it \("):
            group.run(flux, both, flux_job(**JOB))
        assert not group.alive


@pytest.fixture
def pair(untouched: WorkerGroup, fresh: dict[Parallelism, torch.Tensor]) -> WorkerGroup:
    """It refuses from here on: what it made before is known."""
    return untouched


@pytest.mark.parametrize("change", ["touched", "deleted"])
def test_a_checkpoint_that_changed_on_disk_is_refused_and_the_other_models_stay(
    pair: WorkerGroup, flux: ModelSpec, tmp_path: Any, change: str
) -> None:
    before = samples(pair, flux, ULYSSES)
    spec = spec_of(write(tmp_path, "flux_schnell", seed=5))
    path = spec.files[0].path
    os.utime(path, ns=(0, 0)) if change == "touched" else os.unlink(path)
    refused(pair, spec, ULYSSES, "changed on disk after" if change == "touched" else "is gone since it was loaded")
    assert not pair.payloads.has_model(spec)
    assert pair.payloads.has_model(flux)
    assert all(flux.fingerprint in models for models in models_of(pair))
    assert torch.equal(samples(pair, flux, ULYSSES), before)
    assert torch.equal(samples(pair, spec_of(write(tmp_path, "flux_schnell", seed=5)), ULYSSES), before) is False


def test_a_cancel_and_a_refusal_at_once_leave_the_group_warm(
    monkeypatch: pytest.MonkeyPatch, flux: ModelSpec, fresh: dict[Parallelism, torch.Tensor]
) -> None:
    sabotage(monkeypatch, "0 step refuse;1 step refuse")
    with WorkerGroup(on_cpu(ULYSSES)) as group:

        def stop(*_: Any) -> None:
            raise Stop

        with pytest.raises((Stop, Refused)):
            group.run(flux, ULYSSES, flux_job(**JOB), on_step=stop)
        assert group.alive
        with contextlib.suppress(Refused):  # where the cancel was heard first, the refusal is still to come
            samples(group, flux, ULYSSES, **JOB)
        assert torch.equal(samples(group, flux, ULYSSES, **JOB), fresh[ULYSSES])
