"""Forwards recorded and replayed, by tape: which calls are the same, what a recording keeps; a tape sees mistakes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.engine import graph_runner
from parallel_runtime.engine.graph_runner import MAX_RECORDINGS, MAX_UNREPLAYED

from ..site.tape import Tape, TapeRecorder
from .recorded_net import Net, eagerly, inputs, made

pytestmark = pytest.mark.usefixtures("tapes")


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


@pytest.mark.parametrize(("rows", "python"), [(19, (2, 0, 0)), (20, (2, 0, 0)), (17, (2, 0, 0)), (40, (1, 2, 0))])
def test_another_prompt_length_is_recorded_at_once_where_a_recording_was_kept_and_a_larger_picture_is_tried(
    rows: int, python: tuple[int, ...]
) -> None:
    net = Net()
    runner = made(net)
    for seed in range(3):
        net(*inputs(seed, rows=18))
    for seed, expected in enumerate(python):
        before = net.runs
        out = net(*inputs(seed, rows=rows))
        assert net.runs - before == expected
        assert torch.equal(out, eagerly(net, *inputs(seed, rows=rows)))
    assert runner.stats.keys == 2


def test_calls_that_never_come_again_are_not_recorded_at_once_for_ever() -> None:
    net = Net()
    made(net)
    for seed in range(3):
        net(*inputs(seed, rows=18))
    before = net.runs
    for number in range(9):
        net(*inputs(rows=18), scale=2.0 + number)
    assert net.runs - before == 9 + MAX_UNREPLAYED, "a recording runs twice"
    for _ in range(3):
        net(*inputs(rows=18), scale=20.0)  # a trial that ends in a recording: calls come again
    before = net.runs
    net(*inputs(rows=18), scale=21.0)
    assert net.runs - before == 2


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


def test_numbers_that_are_none_are_equal_to_themselves_and_to_nothing_else() -> None:
    nan, inf = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])
    assert graph_runner._equal([nan, inf], [nan.clone(), inf.clone()])
    assert not graph_runner._equal(nan, torch.tensor([1.0, 0.0]))
    assert not graph_runner._equal(inf, torch.tensor([1.0, torch.finfo(torch.float32).max]))


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
