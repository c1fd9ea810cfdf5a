"""What recordings hold of a device: it goes where an evaluation needs it. One that gains nothing is not kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.engine import graph_runner
from parallel_runtime.engine.comm import ranks
from parallel_runtime.engine.graph_runner import SLOWER, GraphRunner
from parallel_runtime.jobs import DemoJob
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import ModelSpec, Parallelism, WeightPlacement
from parallel_runtime.wire.messages import Run
from parallel_runtime.worker import models
from parallel_runtime.worker.models import Model, Models
from parallel_runtime.worker.serve import readings

from ..fake_cuda import fake_group
from ..groups import flux_job

pytestmark = pytest.mark.usefixtures("tapes")

CPU, AWAY = torch.device("cpu"), torch.device("meta")
MIB = 1 << 20


class Device:
    """A device's memory, in bytes, as the driver and PyTorch tell it."""

    def __init__(self, free: int, spare: int) -> None:
        self.free, self.spare = free, spare


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(free=100 * MIB, spare=0)
    monkeypatch.setattr(ranks, "free_bytes", lambda _: made.free)
    monkeypatch.setattr(ranks, "cached_bytes", lambda _: made.spare)
    return made


def test_memory_of_recordings_is_not_there_for_tensors(device: Device) -> None:
    device.free, device.spare = 5 * MIB, 8 * MIB
    assert ranks.can_allocate(AWAY, 10 * MIB, recorded_bytes=3 * MIB)
    assert not ranks.can_allocate(AWAY, 10 * MIB, recorded_bytes=4 * MIB)
    assert not ranks.can_allocate(AWAY, 6 * MIB, recorded_bytes=20 * MIB), "no more than there are"
    assert ranks.can_allocate(CPU, 10 * MIB, recorded_bytes=20 * MIB)


def recorded(**settings: Any) -> tuple[nn.Module, GraphRunner]:
    """A network of one layer, recorded for 4 rows, which says that it runs on a device with memory of its own."""
    network = nn.Linear(8, 8)
    made = GraphRunner(network, CPU, **{"choice": "on", **settings})
    for _ in range(3):
        network(torch.ones(4, 8))
    assert made.stats.keys == 1
    made.device = AWAY
    return network, made


@pytest.mark.parametrize(("evaluations", "dropped"), [(1, False), (3, True)], ids=["as large", "three times as large"])
def test_a_larger_evaluation_needs_more_than_recordings_hold(device: Device, evaluations: int, dropped: bool) -> None:
    _, made = recorded()
    recorded_bytes = made.stats.bytes
    device.free, device.spare = 2 * recorded_bytes, recorded_bytes
    made._trial("another size", [torch.empty(4 * evaluations, 8)])
    assert (made.stats.keys == 0) == dropped


def test_what_others_hold_is_not_there_either(device: Device) -> None:
    _, made = recorded()
    recorded_bytes = made.stats.bytes
    device.free, device.spare = 0, 3 * recorded_bytes
    made._trial("one", [torch.empty(4, 8)])
    assert made.stats.keys == 1, "twice as much as it needs"
    made.other_models_bytes = lambda: 2 * recorded_bytes
    made._trial("another", [torch.empty(4, 8)])
    assert made.stats.keys == 0


def test_an_evaluation_that_is_not_recorded_has_their_memory_where_it_is_tight(device: Device) -> None:
    objection = ""
    network, made = recorded(eager_reason=lambda: objection)
    recorded_bytes, asked = made.stats.bytes, []
    made.any_rank = lambda flag: asked.append(flag) or flag
    objection = "its attention is somebody else's"
    for free in (recorded_bytes, 0):
        device.free, device.spare = free, 0
        for _ in range(2):
            network(torch.ones(4, 8))
        network(torch.ones(3, 8))
        assert (made.stats.keys == 0) == (free == 0)
        objection += ", again"
    assert asked == [False, False, True], "once for each size, and no more where there are none"


class Clocked:
    """A device's moments that pass as if its work took these seconds: each evaluation, and then a replay."""

    def __init__(self, *seconds: float) -> None:
        self.passing = [time for each in seconds for time in (0.0, each)]

    def __call__(self) -> Any:
        return Passed(self.passing.pop(0))


class Passed:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Passed) -> float:
        return 1e3 * (end.seconds - self.seconds)


@pytest.mark.parametrize("votes", [[False], [True]], ids=["alone", "another worker says so"])
@pytest.mark.parametrize(("replay", "kept"), [(0.5, True), (2.0, False)])
def test_a_recording_that_is_slower_than_the_evaluation_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, replay: float, kept: bool, votes: list[bool]
) -> None:
    """As where cards have no direct way to each other."""
    monkeypatch.setattr(graph_runner, "MIN_LAUNCH_FRACTION", -1.0)
    network, asked = nn.Linear(8, 8), []

    def agree(flag: bool) -> bool:
        asked.append(flag)
        return flag or (len(asked) == 4 and votes[0])

    made = GraphRunner(network, CPU, choice="auto", any_rank=agree)
    made._now = Clocked(1.0, 1.0, replay)
    x = torch.randn(4, 8)
    outs = [network(x) for _ in range(5)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert asked == [True, False, False, not kept], "whether it pays, fails, differs, is slower"
    stays = kept and not votes[0]
    assert (made.stats.keys, made.stats.replays, made.stats.eager) == ((1, 2, ()) if stays else (0, 0, (SLOWER,)))


SPECS = [ModelSpec(loader=name) for name in ("high", "low")]


class Whole(Model):
    def split(self, parallelism: Parallelism) -> None: ...


@pytest.fixture
def kept_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with fake_group(2):
        yield Models(CPU, {DemoJob: lambda spec, *_: Whole(spec, nn.Linear(8, 8))})


def evaluated(kept_models: Models, spec: ModelSpec, x: Tensor) -> Model:
    degrees = Parallelism(ulysses_degree=2, options=EngineOptions(cuda_graphs="on"))
    model = kept_models.get(Run(1, spec, degrees, WeightPlacement()), lambda share: None, flux_job())
    model.graph_runner.any_rank = bool  # nobody answers in this group
    for _ in range(3):
        model.network(x)
    return model


def test_recordings_of_another_model_make_room_for_first_evaluations(
    monkeypatch: pytest.MonkeyPatch, kept_models: Models
) -> None:
    """And not where there is room, nor for a model that has its own."""
    asked: list[tuple[int, int]] = []
    fits = True

    def can_allocate(device: torch.device, nbytes: int, recorded_bytes: int) -> bool:
        asked.append((nbytes, recorded_bytes))
        return fits

    monkeypatch.setattr(models, "can_allocate", can_allocate)
    x = torch.randn(4, 8)
    high = evaluated(kept_models, SPECS[0], x)
    size = high.graph_runner.stats.bytes
    low = evaluated(kept_models, SPECS[1], x)
    assert [high.graph_runner.stats.keys, low.graph_runner.stats.keys] == [1, 1]
    assert asked == [(size, size)]
    reading = readings(CPU, kept_models.loaded)
    assert [(one.model, one.recorded) for one in reading.weights] == [("high", size), ("low", size)]
    fits = False
    evaluated(kept_models, SPECS[1], x)
    assert high.graph_runner.stats.keys == 1, "the one that is asked for replays its own"
    low.graph_runner.discard()
    evaluated(kept_models, SPECS[1], x)
    assert [high.graph_runner.stats.keys, low.graph_runner.stats.keys] == [0, 1]
