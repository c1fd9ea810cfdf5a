"""A worker group that records by tape: the same bits, and what becomes of a group that dies while it records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from parallel_runtime.errors import WorkerDied, WorkerFailed, say
from parallel_runtime.group.activity import Activity
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import ModelSpec, Parallelism
from parallel_runtime.wire.messages import Graphs

from ..groups import Stop, flux_job, on_cpu, sabotage, samples, spec_of
from ..zoo.checkpoints import write

ULYSSES = Parallelism(ulysses_degree=2)
PLAIN = Parallelism(ulysses_degree=2, options=EngineOptions(cuda_graphs="off"))


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


@pytest.fixture(scope="module")
def recording() -> Iterator[WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, "tape")
        group = WorkerGroup(on_cpu(ULYSSES))
    with group:
        yield group


def graphs_by_rank(group: WorkerGroup) -> list[Graphs]:
    return [rank.readings.graphs for rank in group.activity.now.ranks if rank.readings]


@pytest.mark.parametrize("other", [ULYSSES, Parallelism(ring_degree=2), Parallelism(cfg_degree=2)])
def test_replays_give_the_bits_of_evaluations(recording: WorkerGroup, flux: ModelSpec, other: Parallelism) -> None:
    plain = [samples(recording, flux, plainly(other), seed=seed) for seed in (1, 2)]
    assert [graphs.keys for graphs in graphs_by_rank(recording)] == [0, 0]
    before = min(graphs.replays for graphs in graphs_by_rank(recording))
    assert all(torch.equal(samples(recording, flux, other, seed=seed), plain[seed - 1]) for seed in (1, 2))
    assert min(graphs.replays for graphs in graphs_by_rank(recording)) >= before + 4
    assert all(0 < graphs.keys <= 2 for graphs in graphs_by_rank(recording))


def plainly(other: Parallelism) -> Parallelism:
    return Parallelism(
        ring_degree=other.ring_degree,
        ulysses_degree=other.ulysses_degree,
        cfg_degree=other.cfg_degree,
        options=EngineOptions(cuda_graphs="off"),
    )


def test_a_cancel_in_the_middle_of_replays_leaves_them_right(recording: WorkerGroup, flux: ModelSpec) -> None:
    want = samples(recording, flux, PLAIN, seed=3)
    samples(recording, flux, ULYSSES, seed=4)

    def stop(step: int, *_: object) -> None:
        if step >= 2:
            raise Stop

    with pytest.raises(Stop):
        recording.run(flux, ULYSSES, flux_job(seed=4, steps=500), on_step=stop)
    assert torch.equal(samples(recording, flux, ULYSSES, seed=3), want)


def test_unloading_takes_recordings_along(recording: WorkerGroup, flux: ModelSpec) -> None:
    samples(recording, flux, ULYSSES)
    assert all(graphs.bytes > 0 for graphs in graphs_by_rank(recording))
    recording.free(flux)
    assert [(graphs.keys, graphs.bytes) for graphs in graphs_by_rank(recording)] == [(0, 0)] * 2
    samples(recording, flux, ULYSSES)


def test_recordings_go_alone_where_their_memory_is_wanted(recording: WorkerGroup, flux: ModelSpec) -> None:
    want = samples(recording, flux, ULYSSES, seed=5)
    before = recording.readings
    assert all(rank.recorded_bytes(flux.fingerprint) == rank.graphs.bytes > 0 for rank in before)
    recording.evict_graphs(flux)
    assert [(graphs.keys, graphs.bytes) for graphs in graphs_by_rank(recording)] == [(0, 0)] * 2
    assert all(rank.recorded_bytes(flux.fingerprint) == 0 for rank in recording.readings)
    resident = [[holding.resident for holding in rank.weights] for rank in recording.readings]
    assert resident == [[holding.resident for holding in rank.weights] for rank in before], "its weights stay"
    assert torch.equal(samples(recording, flux, ULYSSES, seed=5), want)
    assert all(graphs.keys for graphs in graphs_by_rank(recording)), "it is recorded anew"


@pytest.mark.parametrize(("deed", "error"), [("abort", WorkerDied), ("raise", WorkerFailed)])
@pytest.mark.sweep(one_in=2)
def test_a_group_that_dies_recording_is_followed_by_one_that_does_not_record(
    monkeypatch: pytest.MonkeyPatch, flux: ModelSpec, deed: str, error: type[Exception]
) -> None:
    activity = Activity()
    sabotage(monkeypatch, f"tape;1 record {deed}")
    with WorkerGroup(on_cpu(ULYSSES), activity=activity) as group, pytest.raises(error, match=say("died.recording")):
        samples(group, flux, ULYSSES)
    assert say("died.recording") in activity.now.reason
    with WorkerGroup(on_cpu(ULYSSES), activity=activity) as group:
        assert samples(group, flux, ULYSSES).isfinite().all()
        assert [graphs.keys for graphs in graphs_by_rank(group)] == [0, 0]
