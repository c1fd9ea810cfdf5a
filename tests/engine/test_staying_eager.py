"""Which forwards stay eager: by their code, their arguments, another rank, or the time that a recording would save."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.engine import graph_runner
from parallel_runtime.engine.attention.attention_override import backend_override
from parallel_runtime.engine.comm.mesh import ContextMesh, MeshDim
from parallel_runtime.engine.comm.ranks import CommTimer, HostEvent
from parallel_runtime.engine.graph_runner import NO_GAIN, TOO_LONG
from parallel_runtime.specs import ModelSpec
from parallel_runtime.worker.models import Model

from .recorded_net import CPU, Net, eagerly, inputs, made

pytestmark = pytest.mark.usefixtures("tapes")


@pytest.mark.parametrize("read", [lambda x: float(x.max()), lambda x: len(x[x > 0]), lambda x: bool((x > 0).any())])
def test_what_reads_numbers_on_the_host_stays_eager_and_says_so(read: Callable[[Tensor], float]) -> None:
    class Reading(Net):
        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            return super().forward(x, t) * read(x)

    net = Reading()
    runner = made(net)
    for seed in range(4):
        assert torch.equal(net(*inputs(seed)), eagerly(net, *inputs(seed)))
    assert runner.stats.replays == 0
    assert runner.stats.keys == 0
    assert len(runner.stats.eager) == 1
    assert "reads on the host" in runner.stats.eager[0]


def test_what_is_another_each_time_stays_eager() -> None:
    class Dice(Net):
        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            return super().forward(x, t) + torch.rand_like(x)

    net = Dice()
    runner = made(net)
    for seed in range(4):
        net(*inputs(seed))
    assert runner.stats.keys == 0
    assert runner.stats.eager == ("a replay of it gave other numbers",)


def test_objects_among_the_arguments_keep_it_eager_unless_they_are_known() -> None:
    net, known = Net(), backend_override("native")
    runner = made(net)
    for _ in range(3):
        net(*inputs(), more={"code": [object()]})
    assert (runner.stats.keys, runner.stats.eager) == (0, ("it is given a object ([1]['more']['code'][0])",))
    other = made(Net())
    for _ in range(3):
        other.network(*inputs(), more={"code": [known]})
    assert other.stats.keys == 1


def test_no_more_is_remembered_than_is_of_use() -> None:
    class Reading(Net):
        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            return x * float(x.max()) + len(x)

    net = Reading()
    runner = made(net)
    for rows in range(1, 100):
        for _ in range(2):
            net(*inputs(rows=rows))
    for number in range(20):
        net(*inputs(), more={"code": [type(f"Kind{number}", (), {})()]})
    assert max(len(runner._trials), len(runner._evicted)) <= graph_runner.MAX_TRIALS
    assert len(runner.stats.eager) == graph_runner.MAX_REASONS


def test_a_failure_of_another_rank_keeps_this_one_eager_too() -> None:
    net, votes = Net(), []

    def agree(flag: bool) -> bool:
        votes.append(flag)
        return len(votes) > 1  # the first one is about an evaluation that takes too long

    runner = made(net, any_rank=agree)
    for seed in range(4):
        assert torch.equal(net(*inputs(seed)), eagerly(net, *inputs(seed)))
    assert votes == [False, False], "asked once, and never again for this call"
    assert (runner.stats.keys, runner.stats.eager) == (0, ("another worker could not record it",))


def test_off_and_an_objection_leave_it_alone() -> None:
    net = Net()
    runner = made(net, choice="off")
    for _ in range(3):
        net(*inputs())
    assert runner.stats == graph_runner.Graphs()
    objecting = made(net, eager_reason=lambda: "not now")
    for _ in range(3):
        net(*inputs())
    assert objecting.stats == graph_runner.Graphs(eager=("not now",))


def test_ranks_that_exchange_through_main_memory_record_nothing() -> None:
    """As those that share a card: no capture may wait for the CPU."""
    model = Model(ModelSpec(loader="tests"), Net())
    assert model.unrecordable_reason() == ""
    model.mesh = ContextMesh(context=MeshDim(size=2, comm_device=CPU))
    for seed in range(3):
        model.network(*inputs(seed))
    assert model.graph_runner.stats == graph_runner.Graphs(eager=("its ranks exchange tensors through main memory",))


def test_what_stays_eager_runs_while_no_exception_is_handled() -> None:
    """Hooks that hear of a forward's failure may ask what is being handled."""

    class Asking(Net):
        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            handled.append(sys.exc_info()[1])
            return super().forward(x, t)

    handled: list[BaseException | None] = []
    net = Asking()
    made(net, eager_reason=lambda: "not now")(*inputs())
    made(net)(*inputs(), more={"code": [object()]})
    assert handled == [None, None]


class Clock:
    """A device that needs so long for an evaluation, however fast its launch is."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.moments = 0

    def __call__(self) -> Any:
        self.moments += 1
        return Instant(self.moments * self.seconds)


class Instant:
    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 1e3 * float(end.at - self.at)


class Busy:
    """A device that computes each evaluation that long, one after another; the host may wait for it."""

    seconds = 0.05

    def __init__(self) -> None:
        self.free_at = 0.0

    def compute(self) -> None:
        self.free_at = max(self.free_at, time.monotonic()) + self.seconds

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))

    def __call__(self) -> Any:
        moment = Instant(max(self.free_at, time.monotonic()))
        moment.synchronize = lambda: self.wait(moment.at)  # type: ignore[method-assign]
        return moment


def test_a_host_that_waits_for_its_device_in_a_forward_does_not_lead_it() -> None:
    """It sends a constant: its launch takes as long as what was launched before it."""

    class Sending(Net):
        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            device.wait(device.free_at)
            device.compute()
            return super().forward(x, t)

    device, net = Busy(), Sending()
    runner = made(net, choice="auto")
    runner._now = device
    for seed in range(4):
        net(*inputs(seed))
    assert runner.stats == graph_runner.Graphs(eager=(NO_GAIN,))


@pytest.mark.parametrize(("seconds", "keys"), [(1e-9, 1), (60.0, 0)], ids=["led by the host", "led by the device"])
def test_auto_records_what_the_host_leads_and_asks_all(seconds: float, keys: int) -> None:
    net, asked = Net(), []

    def agree(flag: bool) -> bool:
        asked.append(flag)
        return flag

    runner = made(net, choice="auto", any_rank=agree)
    runner._now = Clock(seconds)
    for seed in range(5):
        assert torch.equal(net(*inputs(seed)), eagerly(net, *inputs(seed)))
    assert runner.stats.keys == keys
    assert asked[0] == bool(keys)
    assert runner.stats.eager == (() if keys else (NO_GAIN,))


@pytest.mark.parametrize(("seconds", "keys"), [(19.0, 1), (21.0, 0)])
def test_an_evaluation_that_takes_long_is_not_recorded_though_asked_for(seconds: float, keys: int) -> None:
    """The host would take a replay of minutes for a rank that hangs."""
    net = Net()
    runner = made(net)
    runner._now = Clock(seconds)
    for seed in range(5):
        assert torch.equal(net(*inputs(seed)), eagerly(net, *inputs(seed)))
    assert (runner.stats.keys, runner.stats.eager) == (keys, () if keys else (TOO_LONG,))


def test_no_transfer_is_timed_in_the_evaluation_whose_time_decides() -> None:
    model = Model(ModelSpec(loader="tests"), Net())
    world = model.mesh.context.group_state
    model.graph_runner._now, seen = Clock(60.0), []
    model.network.register_forward_pre_hook(lambda *_: seen.append(world.comm_timer is not None))
    for seed in range(4):
        world.comm_timer = CommTimer(HostEvent)
        model.network(*inputs(seed))
    assert seen == [True, False, True, True]


def test_the_evaluation_whose_time_decides_is_announced_and_no_other() -> None:
    net, calls = Net(), []
    runner = made(net, choice="auto", before_timing=lambda: calls.append(runner._evaluations))
    runner._now = Clock(60.0)
    for seed in range(4):
        net(*inputs(seed))
    assert calls == [2]
