"""Forwards recorded and replayed, by tape: which calls are the same, what stays eager; a tape sees mistakes."""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.engine.comm.device_events import CommTimer, HostEvent
from parallel_runtime.engine.comm.mesh import ContextMesh, MeshDim
from parallel_runtime.engine.graphs import graph_runner
from parallel_runtime.engine.graphs.graph_runner import MAX_RECORDINGS, NO_GAIN, GraphRunner
from parallel_runtime.specs import ModelSpec
from parallel_runtime.worker.models import Model

from ..site.tape import Tape, TapeRecorder

CPU = torch.device("cpu")


class Net(nn.Module):
    """Counts how often its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.runs = 0

    def forward(self, x: Tensor, t: Tensor, scale: float = 1.0, more: Any = None, **_: Any) -> Any:
        self.runs += 1
        return scale * (x @ self.weight).add_(t[:, None])


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graph_runner.cuda_graphs, "recorder_for", lambda device: TapeRecorder())
    with torch.inference_mode():
        yield


def made(net: nn.Module, **settings: Any) -> GraphRunner:
    return GraphRunner(net, CPU, **{"choice": "on", **settings})


def inputs(seed: int = 0, rows: int = 2) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=dice), torch.rand(rows, generator=dice)


def eagerly(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return net._call_impl(*args, **kwargs)


def test_the_first_call_is_eager_the_second_recorded_and_the_rest_replayed_with_the_same_bits() -> None:
    net = Net()
    runner = made(net)
    for seed in range(6):
        before = net.runs
        assert torch.equal(net(*inputs(seed)), eagerly(net, *inputs(seed)))
        python = net.runs - before - 1
        assert python == (1, 2, 0, 0, 0, 0)[seed], "once rehearsed, once recorded, and then no more"
    assert (runner.stats.keys, runner.stats.replays, runner.stats.eager) == (1, 4, ())
    assert runner.stats.bytes > 0


def test_what_a_replay_gave_is_the_callers_own() -> None:
    net = Net()
    made(net)
    outs = [net(*inputs(seed)) for seed in range(4)]
    assert all(torch.equal(out, eagerly(net, *inputs(seed))) for seed, out in enumerate(outs))
    given = inputs(4)
    kept = given[0].clone()
    net(*given)
    assert torch.equal(given[0], kept)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, t: ((x, t), {"scale": 2.0}),
        lambda x, t: ((x, t), {"more": [None]}),
        lambda x, t: ((torch.cat([x, x]), torch.cat([t, t])), {}),
        lambda x, t: ((x.t().contiguous().t(), t), {}),
        lambda x, t: ((x.double(), t.double()), {}),
        lambda x, t: ((x, t[:1].expand(2)), {}),
        lambda x, t: ((x, t), {"more": x}),
        lambda x, t: ((x, t), {"more": x.clone()}),
    ],
    ids=["number", "none", "rows", "layout", "dtype", "expanded", "twice", "another tensor"],
)
def test_a_call_that_python_can_tell_apart_is_another(other: Callable[..., Any]) -> None:
    net = Net().double() if "double" in other.__code__.co_names else Net()
    runner = made(net)
    plain = [tensor.to(net.weight.dtype) for tensor in inputs()]
    for _ in range(3):
        net(*plain)
    assert runner.stats.keys == 1
    for _ in range(3):
        args, kwargs = other(*inputs())
        got = net(*args, **kwargs)
        assert torch.equal(got, eagerly(net, *args, **kwargs))
    same = all(a.dtype == b.dtype for a, b in zip(args, plain, strict=True)) and net.weight.dtype == torch.float64
    assert runner.stats.keys == (1 if same else 2)


def test_a_large_input_lies_in_its_line_where_the_callers_does_and_a_small_one_anywhere() -> None:
    net = Net()
    runner = made(net)
    rows = torch.cat([inputs(seed, 400)[0] for seed in range(2)])
    for start in (0, 2, 0, 2, 0, 2):  # 2 rows are a line
        part, t = rows[start : start + 300], torch.rand(600)[start : start + 300]
        assert torch.equal(net(part, t), eagerly(net, part, t))
    assert runner.stats.keys == 1
    shifted = rows.flatten()[3 : 3 + 300 * 8].view(300, 8)
    for _ in range(3):
        assert torch.equal(net(shifted, t), eagerly(net, shifted, t))
    assert runner.stats.keys == 2


def test_a_dims_row_that_is_there_once_is_copied_once() -> None:
    net = Net()
    runner = made(net)
    for seed in range(4):
        x, t = inputs(seed)
        assert torch.equal(net(x, t[:1].expand(2)), eagerly(net, x, t[:1].expand(2)))
    assert runner.stats.replays == 2


def test_no_more_than_four_calls_are_held_the_longest_unused_goes() -> None:
    net = Net()
    runner = made(net)
    for rows in range(1, 8):
        for _ in range(3):
            assert torch.equal(net(*inputs(rows=rows)), eagerly(net, *inputs(rows=rows)))
        assert runner.stats.keys == min(rows, MAX_RECORDINGS)


def test_calls_in_turn_do_not_throw_each_other_out() -> None:
    net = Net()
    runner = made(net)
    for _ in range(4):
        for rows in range(1, MAX_RECORDINGS + 2):
            net(*inputs(rows=rows))
    before = net.runs
    for _ in range(10):
        for rows in range(1, MAX_RECORDINGS + 2):
            net(*inputs(rows=rows))
    assert net.runs - before == 10, "one is eager, and four stay"
    assert runner.stats.eager == (f"more than {MAX_RECORDINGS} sizes, prompt lengths or the like take turns",)


def test_lists_that_a_forward_empties_are_full_again_for_the_next() -> None:
    class Popping(Net):
        def forward(self, x: Tensor, t: Tensor, control: Any = None, **_: Any) -> Tensor:
            return super().forward(x, t) + control["output"].pop()

    net = Popping()
    runner = made(net)
    for seed in range(4):
        residual = inputs(seed + 10)[0]
        got = net(*inputs(seed), control={"output": [residual]})
        assert torch.equal(got, eagerly(net, *inputs(seed), control={"output": [residual]}))
    assert runner.stats.replays == 2


def test_several_outputs_come_as_they_were() -> None:
    class Two(Net):
        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Any:
            return [super().forward(x, t), t * 2]

    net = Two()
    made(net)
    for seed in range(4):
        got, want = net(*inputs(seed)), eagerly(net, *inputs(seed))
        assert isinstance(got, list)
        assert all(map(torch.equal, got, want))


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


def test_numbers_that_are_none_are_equal_to_themselves_and_to_nothing_else() -> None:
    nan, inf = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])
    assert graph_runner._equal([nan, inf], [nan.clone(), inf.clone()])
    assert not graph_runner._equal(nan, torch.tensor([1.0, 0.0]))
    assert not graph_runner._equal(inf, torch.tensor([1.0, torch.finfo(torch.float32).max]))


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


def test_objects_among_the_arguments_keep_it_eager_unless_they_are_known() -> None:
    net, thing = Net(), object()
    runner = made(net)
    for _ in range(3):
        net(*inputs(), more={"code": [thing]})
    assert (runner.stats.keys, runner.stats.eager) == (0, ("it is given a object ([1]['more']['code'][0])",))
    known = made(Net(), constant_objects=lambda: [thing])
    for _ in range(3):
        known.network(*inputs(), more={"code": [thing]})
    assert known.stats.keys == 1


def test_a_failure_of_another_rank_keeps_this_one_eager_too() -> None:
    net, votes = Net(), []

    def agree(flag: bool) -> bool:
        votes.append(flag)
        return True

    runner = made(net, any_rank=agree)
    for seed in range(4):
        assert torch.equal(net(*inputs(seed)), eagerly(net, *inputs(seed)))
    assert votes == [False], "asked once, and never again for this call"
    assert (runner.stats.keys, runner.stats.eager) == (0, ("another worker could not record it",))


def test_a_recording_begins_and_ends_aloud_also_where_it_fails() -> None:
    recordings: list[bool] = []
    net = Net()
    made(net, on_recording=recordings.append)
    for _ in range(3):
        net(*inputs())
    assert recordings == [True, False]

    class Broken(TapeRecorder):
        @staticmethod
        def record(run: Callable[[], Any]) -> Tape:
            raise RuntimeError("no room in here\nand a traceback")

    runner = made(net, on_recording=recordings.append)
    runner._recorder = Broken()
    for _ in range(3):
        assert torch.equal(net(*inputs()), eagerly(net, *inputs()))
    assert recordings == [True, False] * 2
    assert runner.stats.eager == ("recording it failed: no room in here",)


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


def test_no_transfer_is_timed_in_the_evaluation_whose_time_decides() -> None:
    model = Model(ModelSpec(loader="tests"), Net())
    world = model.mesh.context.group_state
    model.graph_runner._now, seen = Clock(60.0), []
    model.network.register_forward_pre_hook(lambda *_: seen.append(world.comm_timer is not None))
    for seed in range(4):
        world.comm_timer = CommTimer(HostEvent)
        model.network(*inputs(seed))
    assert seen == [True, False, True, True]


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


def test_what_the_networks_code_goes_by_is_part_of_a_call() -> None:
    class Choosing(Net):
        method: Any = 1

        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            return super().forward(x, t) * (self.method if type(self.method) is int else -1)

    net = Choosing()
    runner = made(net, settings=lambda: (type(net.method), net.method))
    for method in (1, 2, 1, 1.0, 2, 1):
        net.method = method
        for _ in range(3):
            assert torch.equal(net(*inputs()), eagerly(net, *inputs()))
    assert (runner.stats.keys, runner.stats.eager) == (3, ())


class Bare(TapeRecorder):
    """What it records keeps nothing that it reads, as a graph."""

    @staticmethod
    def record(run: Callable[[], Any]) -> Any:
        out = run()
        return SimpleNamespace(out=out, nbytes=1, replay=lambda: None)


def test_a_cached_result_that_others_evict_lives_as_long_as_what_was_recorded_with_it() -> None:
    class Positions(Net):
        @functools.lru_cache(maxsize=1)  # noqa: B019 - as in ComfyUI's network of Chroma Radiance
        def table(self, size: int) -> Tensor:
            return torch.ones(size)

        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            return x * self.table(8) * t[:, None]

    net, another = Positions(), Positions()
    runner = made(net)
    runner._recorder = Bare()  # type: ignore[assignment]
    for _ in range(2):
        net(*inputs())
    table = weakref.ref(net.table(8))
    another.table(8)
    assert runner.stats.keys == 1
    assert table() is not None
    runner.discard()
    gc.collect()
    assert table() is None


def test_the_evaluation_whose_time_decides_is_announced_and_no_other() -> None:
    net, calls = Net(), []
    runner = made(net, choice="auto", before_timing=lambda: calls.append(runner._evaluations))
    runner._now = Clock(60.0)
    for seed in range(4):
        net(*inputs(seed))
    assert calls == [2]


def test_a_buffer_that_the_network_makes_anew_lives_as_long_as_what_was_recorded_with_it() -> None:
    """A graph reads it where it was."""
    net = Net()
    net.register_buffer("table", torch.ones(8), persistent=False)
    runner = made(net)
    runner._recorder = Bare()  # type: ignore[assignment]
    for _ in range(2):
        net(*inputs())
    table = weakref.ref(net.table)
    net.table = torch.ones(16)
    assert runner.stats.keys == 1
    assert table() is not None
    runner.discard()
    gc.collect()
    assert table() is None


def test_weights_that_move_take_their_recordings_with_them() -> None:
    """Without `drop` the tape, as a graph, reads where they were."""
    net = Net()
    runner = made(net)
    for _ in range(3):
        net(*inputs())
    net.weight = nn.Parameter(net.weight * 2, requires_grad=False)
    assert not torch.equal(net(*inputs()), eagerly(net, *inputs()))
    runner.discard()
    assert runner.stats.keys == 0
    for _ in range(3):
        assert torch.equal(net(*inputs()), eagerly(net, *inputs()))
    assert runner.stats.keys == 1


def test_a_tape_sees_an_input_that_was_not_copied_in() -> None:
    net = Net()
    x, t = inputs()
    tape = Tape(lambda: net._call_impl(x, t))
    tape.replay()
    assert torch.equal(tape.out, eagerly(net, *inputs()))
    tape.replay()
    other = inputs(5)
    assert not torch.equal(tape.out, eagerly(net, *other))
    for tensor, new in zip((x, t), other, strict=True):
        tensor.copy_(new)
    tape.replay()
    assert torch.equal(tape.out, eagerly(net, *other))
