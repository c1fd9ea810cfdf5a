"""What is compared with one worker is measured like it."""

from __future__ import annotations

import pytest

from parallel_runtime.group.activity import Activity
from parallel_runtime.group.history import Size
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import ModelSpec, Parallelism
from parallel_runtime.wire.messages import Step

from .test_activity import BY_ALL, RUN, TWO, Clock, alone_then, sample, started


def test_token_patches_are_not_compared_with_one_worker_which_makes_another_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    activity = alone_then(Activity(), clock, TWO, alone=1.75, seconds=1.0)
    patched = Parallelism(pipeline_degree=2, options=EngineOptions(token_patches=4))
    sample(activity, clock, patched, seconds=0.9)
    run = activity.now.runs[-1]
    assert (run.alone, run.measured, run.approximate) == (None, False, True)
    assert {pace.speedup for pace in activity.history.paces("this work") if pace.setup.patched} == {None}
    sample(activity, clock, seconds=1.0)
    assert (activity.now.runs[-1].alone, activity.now.runs[-1].approximate) == (1.75, False)


def test_the_second_step_which_may_be_recorded_is_no_part_of_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    activity.history.size = Size("this work")
    paces = []
    with activity.recorded("sampling"):
        activity.begin_request(ModelSpec(loader="a"), BY_ALL[2], RUN)
        for step, seconds in enumerate((5.0, 3.0, 1.0, 1.0)):
            clock.after(seconds)
            activity.receive(0, Step(1, step, 4))
            paces.append(activity.now.runs[-1].step_seconds)
    assert paces == [None, 3.0, 1.0, 1.0]
