"""What the page is told of a group follows what it is asked for."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from torch import zeros

from parallel_runtime.errors import Cause, ParallelError, Refused, WorkerDied, WorkerStartError, say
from parallel_runtime.group import activity as activity_module
from parallel_runtime.group.activity import Activity
from parallel_runtime.group.history import HISTORY_LENGTH, History, Size
from parallel_runtime.jobs import EncodingJob, EvaluationJob, VAEJob
from parallel_runtime.specs import ModelSpec, Parallelism, Placement
from parallel_runtime.wire.messages import Done, Heartbeat, Joined, Step

TWO = Placement(devices=("cuda:0", "cuda:1"))
BY_ALL = {workers: Parallelism(ulysses_degree=workers) for workers in (1, 2)}
DECODE = VAEJob(
    method="decode",
    x=zeros(1),
    unit=8,
    shape=[1],
    dtype="float32",
    offset=0,
    random_states={},
    chunk_bytes=0,
    weights=None,
)
ENCODING = EncodingJob(method="encode_token_weights", ranks=[0], stages=[], calls=[], weight_patches=None)
EVALUATION = EvaluationJob(
    call_arguments={}, options=None, cond_number=1, cond_arguments=None, weight_patches=None, batch_coupled=False
)
RUN: Any = object()  # the kind of a job decides nothing here


class Clock:
    """`time.time`, which somebody may have `set_back`, and `time.monotonic`, which always goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.set_back = 1000.0, 0.0
        monkeypatch.setattr(activity_module.time, "time", lambda: self.now - self.set_back)
        monkeypatch.setattr(activity_module.time, "monotonic", lambda: self.now)

    def after(self, seconds: float) -> None:
        self.now += seconds


def started(clock: Clock, placement: Placement = TWO) -> Activity:
    """A group that took three seconds to come up, for a prompt."""
    activity = Activity()
    activity.history.expect()
    activity.starting(placement)
    clock.after(3)
    ranks = range(placement.world_size)
    activity.joined({rank: Joined(bytes_per_second=0.0, flops_per_second=0.0) for rank in ranks}, [""] * len(ranks))
    return activity


def sample(
    activity: Activity,
    clock: Clock,
    degrees: Parallelism | None = None,
    *,
    seconds: float,
    steps: int = 4,
    sampler: str = "",
    prompt: object = None,
) -> None:
    job: Any = SimpleNamespace(sampler=sampler)
    with activity.recorded("sampling", prompt, "a"):
        activity.begin_request(ModelSpec(loader="a"), degrees or BY_ALL[activity.now.placement.world_size], job)
        clock.after(2)
        activity.receive(0, Heartbeat(1, None))
        for step in range(steps):
            clock.after(5 if step == 0 else seconds)
            activity.receive(0, Step(1, step, steps))
        activity.receive(0, Done(1, seconds=0.0, load_seconds=0.0))
        activity.end_request(job)


def test_a_clock_that_is_set_back_in_the_middle_of_a_run_changes_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity, run = started(clock), History.step_done

    def set_back(*arguments: Any) -> None:
        clock.set_back = 3600.0
        run(*arguments)

    monkeypatch.setattr(History, "step_done", set_back)
    sample(activity, clock, seconds=1.5)
    last = activity.now.runs[-1]
    assert last.step_seconds == 1.5
    assert dict(last.phases) == {"starting": 3.0, "loading": 2.0, "sampling": 9.5}


def test_a_native_samplers_run_goes_on_however_long_it_computes_between_two_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    activity, model = started(clock), ModelSpec(loader="a")
    for _ in range(2):
        with activity.recorded("sampling", goes_on=True):
            activity.begin_request(model, BY_ALL[2], EVALUATION)
            activity.receive(0, Heartbeat(1, None))
            activity.end_request(EVALUATION)
        clock.after(60)  # ComfyUI's process computes
        assert activity.now.state == "sampling"
    activity.end_evaluations()
    assert activity.now.state == "idle"
    assert phases_of_runs(activity) == [{"starting": 3.0, "loading": 0.0, "sampling": 120.0}]


def test_another_models_evaluation_loads_it() -> None:
    activity = Activity()
    activity.begin_request(ModelSpec(loader="a"), Parallelism(), EVALUATION)
    activity.end_request(EVALUATION)
    same_name = ModelSpec(loader="a", arguments='["another folder"]')
    activity.begin_request(same_name, Parallelism(), EVALUATION)
    assert activity.now.state == "loading", "another model"
    activity.end_request(EVALUATION)
    activity.begin_request(ModelSpec(loader="b"), Parallelism(), RUN)
    assert activity.now.state == "loading"
    activity.receive(0, Heartbeat(1, None))
    assert activity.now.state == "sampling"


def test_a_runs_time_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    clock.after(60)  # ComfyUI encodes the text
    sample(activity, clock, seconds=1.5, prompt="one")
    decode(activity, clock, 4, prompt="one")
    (run,) = activity.now.runs
    assert run.phases == (("starting", 3.0), ("loading", 2.0), ("sampling", 9.5), ("decoding", 4.0))
    assert (run.steps, run.workers, run.end) == (4, 2, "idle")
    assert run.step_seconds == 1.5, "the first step is not like the others"
    sample(activity, clock, seconds=1.0)
    assert [dict(run.phases).get("starting") for run in activity.now.runs] == [3.0, None]


def decode(activity: Activity, clock: Clock, seconds: float, *, prompt: str) -> None:
    with activity.recorded("decoding", prompt):
        activity.begin_request(ModelSpec(loader="vae"), Parallelism(), DECODE)
        clock.after(seconds)
        activity.end_request(DECODE)


def encode(activity: Activity, clock: Clock, seconds: float, *, prompt: str) -> None:
    """By a text encoder."""
    with activity.recorded("prompt", prompt, "t5.safetensors"):
        activity.begin_request(ModelSpec(loader="t5"), Parallelism(), ENCODING)
        clock.after(seconds)
        activity.end_request(ENCODING)


def test_a_text_that_workers_encode_is_a_row_of_its_own_and_not_a_part_of_the_run_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    for seconds in (7, 1):  # both texts
        encode(activity, clock, seconds, prompt="one")
    sample(activity, clock, seconds=1.5, prompt="one")
    encode(activity, clock, 5, prompt="two")
    assert phases_of_runs(activity) == [
        {"starting": 3.0, "encoding": 8.0}, {"loading": 2.0, "sampling": 9.5}, {"encoding": 5.0}
    ]  # fmt: skip
    assert [run.model for run in activity.now.runs] == ["t5.safetensors", "a", "t5.safetensors"]


def test_a_decode_belongs_to_the_run_of_its_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    sample(activity, clock, seconds=1.5, prompt="one")
    decode(activity, clock, 4, prompt="two")
    sample(activity, clock, seconds=1.5, prompt="two")
    sample(activity, clock, seconds=1.5, prompt="two")
    decode(activity, clock, 4, prompt="two")
    assert [[name for name, _ in run.phases] for run in activity.now.runs] == [
        ["starting", "loading", "sampling"], ["decoding"], ["loading", "sampling"], ["loading", "sampling", "decoding"]
    ]  # fmt: skip


def test_what_measure_and_compare_ask_for_is_told_apart_and_is_no_part_of_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    for activity.history.purpose in ("compare", "measure", ""):
        sample(activity, clock, seconds=1.5, prompt="one")
    decode(activity, clock, 4, prompt="one")
    assert [(run.measuring, run.comparing) for run in activity.now.runs] == [(False, True), (True, False), (False,) * 2]
    assert [len(run.phases) for run in activity.now.runs] == [3, 2, 3]


def fail(activity: Activity, clock: Clock, error: BaseException) -> None:
    """A run that this error ends; the one of a preview in it does not."""
    with activity.recorded("sampling"):
        activity.begin_request(ModelSpec(loader="a"), BY_ALL[2], RUN)
        clock.after(1)
        with suppress(Refused), activity.recorded("decoding"):
            raise Refused("workers.busy")
        activity.end_request(RUN)
        raise error


def test_a_run_is_over_as_its_lease_is_whatever_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    refused = Refused("memory.raise", out="Take a smaller model", limit="CP_MEMORY_GIB")
    for error in (refused, KeyboardInterrupt(), WorkerDied("gone")):
        with pytest.raises(type(error)):
            fail(activity, clock, error)
    assert [run.end for run in activity.now.runs] == ["refused", "cancelled", "died"]
    assert activity.now.runs[0].reason is refused.sentence


def phases_of_runs(activity: Activity) -> list[dict[str, float]]:
    """The seconds of each phase, of each run."""
    return [
        {name: sum(took for other, took in run.phases if other == name) for name, _ in run.phases}
        for run in activity.now.runs
    ]


def test_a_start_that_was_over_before_a_run_was_asked_for_is_none_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    activity.history.expect_nobody()  # the user has restarted the workers
    clock.after(60)
    activity.history.expect()
    sample(activity, clock, seconds=1.5)
    assert phases_of_runs(activity) == [{"starting": 3.0}, {"loading": 2.0, "sampling": 9.5}]
    assert [run.end for run in activity.now.runs] == ["idle", "idle"]


def test_of_a_start_that_goes_on_a_run_has_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = Activity()
    activity.starting(TWO)
    clock.after(20)
    activity.history.expect()
    clock.after(30)
    activity.history.expect()  # another prompt is queued
    clock.after(5)
    activity.joined({rank: Joined(bytes_per_second=0.0, flops_per_second=0.0) for rank in (0, 1)}, ["", ""])
    sample(activity, clock, seconds=1.5)
    assert phases_of_runs(activity) == [{"starting": 20.0}, {"starting": 35.0, "loading": 2.0, "sampling": 9.5}]


@pytest.mark.parametrize("encoding", [0, 30])
def test_a_start_for_a_prompt_is_its_runs_own(encoding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = Activity()
    activity.history.expect()
    activity.starting(TWO)
    clock.after(55)
    activity.joined({rank: Joined(bytes_per_second=0.0, flops_per_second=0.0) for rank in (0, 1)}, ["", ""])
    clock.after(encoding)
    sample(activity, clock, seconds=1.5)
    assert phases_of_runs(activity) == [{"starting": 55.0, "loading": 2.0, "sampling": 9.5}]


def test_a_prompt_that_came_to_nothing_leaves_its_start_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = Activity()
    activity.history.expect()
    activity.starting(TWO)
    clock.after(3)
    activity.joined({rank: Joined(bytes_per_second=0.0, flops_per_second=0.0) for rank in (0, 1)}, ["", ""])
    clock.after(600)
    activity.history.expect()
    sample(activity, clock, seconds=1.5)
    assert phases_of_runs(activity) == [{"starting": 3.0}, {"loading": 2.0, "sampling": 9.5}]


def test_steps_are_counted_to_the_last_one_also_where_nobody_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    with activity.recorded("sampling"):
        activity.begin_request(ModelSpec(loader="a"), Parallelism(), RUN)
        for step in range(11):  # of twelve; and nobody has said that all is loaded
            clock.after(0.1)
            activity.receive(0, Step(1, step, 12))
            assert activity.now.state == "sampling"
            assert activity.now.runs[-1].steps == activity.now.step == step + 1
        activity.end_request(RUN)
    assert activity.now.runs[-1].steps == 12


def test_a_run_is_compared_with_one_worker_as_estimated_and_once_there_was_one_as_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    activity.history.size = Size("this work", speedup=1.8)
    sample(activity, clock, seconds=1.0)
    assert (activity.now.runs[-1].alone, activity.now.runs[-1].measured) == (1.8, False)
    activity.starting(Placement(devices=("cuda:0",)))
    activity.joined({0: Joined(bytes_per_second=0.0, flops_per_second=0.0)}, [""])
    sample(activity, clock, seconds=1.75)
    assert activity.now.runs[-1].alone is None, "it is one worker"
    assert [(pace.setup.workers, pace.seconds, pace.speedup) for pace in activity.history.paces("this work")] == [
        (1, 1.75, None), (2, 1.0, 1.75),
    ]  # fmt: skip
    activity.starting(TWO)
    sample(activity, clock, seconds=1.0)
    assert (activity.now.runs[-1].alone, activity.now.runs[-1].measured) == (1.75, True)
    activity.history.size = Size("other work")
    sample(activity, clock, seconds=1.0)
    assert activity.now.runs[-1].alone is None


def alone_then(activity: Activity, clock: Clock, placement: Placement, *, alone: float, seconds: float) -> Activity:
    """The same work by one worker, and by all of `placement`."""
    activity.history.size = Size("this work", speedup=1.8)
    activity.starting(Placement(devices=placement.devices[:1]))
    sample(activity, clock, seconds=alone)
    activity.starting(placement)
    sample(activity, clock, seconds=seconds)
    return activity


@pytest.mark.parametrize(
    ("devices", "alone", "times"),
    [
        (("cuda:0", "cuda:1"), 2.25, 2.25),
        (("cuda:0", "cuda:1"), 2.5, None),  # nobody is more than twice as fast by a second one
        (("cuda:0", "cuda:0"), 1.5, None),  # they share it: what one has the other lacks
        (("cpu", "cpu"), 18.5, None),  # they share its cores
        (("cpu", "cpu"), 1.5, None),
    ],
)
def test_workers_are_so_many_times_as_fast_only_where_each_has_a_device_and_it_can_be(
    devices: tuple[str, ...], alone: float, times: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    activity = alone_then(Activity(), Clock(monkeypatch), Placement(devices=devices), alone=alone, seconds=1.0)
    run = activity.now.runs[-1]
    assert run.step_seconds == 1.0
    assert (run.alone, run.measured) == (times, times is not None)
    slow, fast = activity.history.paces("this work")
    assert (slow.seconds, slow.speedup, fast.seconds, fast.speedup) == (alone, None, 1.0, times)


@pytest.mark.parametrize("times", [1.8, 31.0])
def test_an_estimate_is_no_more_than_workers_can_be(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for placement, promised in ((TWO, 1.8 if times < 2 else None), (Placement(devices=("cuda:0", "cuda:0")), None)):
        activity = started(clock, placement)
        activity.history.size = Size("this work", speedup=times)
        sample(activity, clock, seconds=1.0)
        assert (activity.now.runs[-1].alone, activity.now.runs[-1].measured) == (promised, False)


def test_a_pace_is_of_the_degrees_that_it_was_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = alone_then(Activity(), clock, TWO, alone=1.75, seconds=1.0)
    sample(activity, clock, Parallelism(pipeline_degree=2), seconds=1.5)
    paces = [(pace.setup.degrees.by_name, pace.seconds, pace.speedup) for pace in activity.history.paces("this work")]
    one, stages = Parallelism().by_name, Parallelism(pipeline_degree=2).by_name
    assert paces == [(one, 1.75, None), (stages, 1.5, 1.75 / 1.5), (BY_ALL[2].by_name, 1.0, 1.75)]
    assert activity.now.runs[-1].alone == pytest.approx(1.75)


def test_paces_are_of_the_sampler_that_was_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    activity.history.size = Size("this work")
    for sampler, seconds in (("euler", 1.75), ("heun", 3.5), ("euler", 1.5)):
        for degrees in (BY_ALL[2], Parallelism(pipeline_degree=2)):
            sample(activity, clock, degrees, seconds=seconds, sampler=sampler)
        assert {pace.seconds for pace in activity.history.paces("this work")} == {seconds}


def test_what_measuring_will_take_is_known_once_such_work_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = alone_then(Activity(), Clock(monkeypatch), TWO, alone=1.75, seconds=1.0)
    assert activity.history.cost("other work", [1, 2], 4) is None
    took = [dict(run.phases) for run in activity.now.runs]
    before = max(run.get("starting", 0.0) + run.get("loading", 0.0) for run in took)
    assert activity.history.cost("this work", [1, 2], 4) == pytest.approx(2 * before + 4 * 1.75 + 4 * 1.75 / 2)


def test_measuring_starts_workers_however_many_runs_ago_the_last_start_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = alone_then(Activity(), clock, TWO, alone=1.75, seconds=1.0)
    before = activity.history.cost("this work", [2], 4)
    for _ in range(2 * HISTORY_LENGTH):
        sample(activity, clock, seconds=1.0)
    assert not any(name == "starting" for run in activity.now.runs for name, _ in run.phases)
    assert activity.history.cost("this work", [2], 4) == pytest.approx(before)


def test_a_start_says_how_far_it_is_and_one_that_fails_is_no_death() -> None:
    activity = Activity()
    activity.starting(TWO)
    activity.set_stage("processes", 1)
    assert (activity.now.stage, activity.now.step, activity.now.steps) == ("processes", 1, 2)
    activity.failed(WorkerStartError("rank 1 could not start", Cause(kind="raised", rank=1)))
    assert (activity.now.state, activity.now.reason) == ("unstarted", "rank 1 could not start")
    assert [run.end for run in activity.now.runs] == ["unstarted"]
    assert activity.now.loss is not None


def test_a_death_names_the_rank_and_its_last_words_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = started(Clock(monkeypatch))
    activity.journal.note("about to fall", 1)
    activity.journal.note("what the other one says", 0)
    activity.rank_gone("rank 1", 1)
    assert activity.now.loss is not None
    assert (activity.now.loss.rank, activity.now.loss.settled) == (1, False)
    cause = Cause(kind="killed", rank=1, signal="SIGKILL")
    activity.lost(WorkerDied(cause.sentence("rank 1"), cause))
    assert (activity.now.loss.rank, activity.now.loss.kind, activity.now.loss.settled) == (1, "killed", True)
    assert activity.now.loss.words[-1] == "about to fall"
    activity.starting(TWO)
    assert activity.now.loss is None


def test_workers_that_hold_nothing_are_not_said_to_have_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    activity.begin_request(ModelSpec(loader="a"), Parallelism(), RUN)
    activity.set_state("cancelling")
    activity.models_unloaded()
    assert activity.now.state == "cancelling", "not in the middle of something"
    activity.cancelled()
    activity.models_unloaded()
    assert (activity.now.state, activity.now.model, activity.now.degrees) == ("idle", "", None)


def test_a_slower_run_does_not_overwrite_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = alone_then(Activity(), clock, TWO, alone=1.75, seconds=1.0)
    measured_at = activity.now.runs[-1].began
    sample(activity, clock, seconds=4.0)
    assert [pace.seconds for pace in activity.history.paces("this work")] == [1.75, 1.0]
    assert activity.history.paces("this work")[1].at == measured_at
    sample(activity, clock, seconds=0.9)
    assert [pace.seconds for pace in activity.history.paces("this work")] == pytest.approx([1.75, 0.9])


def test_measure_compares_what_it_has_measured_itself_also_where_an_earlier_run_was_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    activity = alone_then(Activity(), clock, TWO, alone=1.75, seconds=1.0)
    activity.history.purpose = "measure"
    sample(activity, clock, seconds=4.0)
    assert [pace.seconds for pace in activity.history.paces("this work")] == [1.75, 4.0]


def test_measurements_and_starts_do_not_push_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    for _ in range(3):
        sample(activity, clock, seconds=1.0)
    activity.history.purpose = "measure"
    for _ in range(HISTORY_LENGTH):
        sample(activity, clock, seconds=1.0)
    runs = activity.now.runs
    assert len(runs) == HISTORY_LENGTH
    assert [run.measuring for run in runs] == [False] * 3 + [True] * (HISTORY_LENGTH - 3)
    assert {(run.workers, run.kind, run.end) for run in runs} == {(2, "cuda", "idle")}


def test_the_log_says_cancels_and_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = started(Clock(monkeypatch))
    activity.begin_request(ModelSpec(loader="a"), Parallelism(), RUN)
    activity.cancelled()
    activity.lost(ParallelError(say("died.gone", worker="rank 1")))
    lines = [line.text for line in activity.journal.tail()]
    assert lines[-2:] == ["[CP] the run was cancelled", "[CP] the workers ended: worker rank 1 went away"]


def test_a_refused_run_is_among_the_last_runs_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    sample(activity, clock, seconds=1)
    reason = say("memory.raise", out="Take a smaller model", limit="CP_MEMORY_GIB")
    activity.refused(reason)
    activity.refused(reason)  # told by two nodes on its way out
    assert [(run.end, run.reason) for run in activity.now.runs[-2:]] == [("idle", ""), ("refused", reason)]
    assert activity.now.state == "idle"
    sample(activity, clock, seconds=2)
    *_, refused, last = activity.now.runs
    assert (refused.end, refused.phases, refused.steps) == ("refused", (), 0)
    assert (last.end, last.reason, last.steps) == ("idle", "", 4)


def test_a_run_that_the_workers_refuse_has_not_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = started(clock)
    refused = Refused("memory.raise", out="Take a smaller model", limit="CP_MEMORY_GIB")
    reason = refused.sentence
    with pytest.raises(Refused):
        fail(activity, clock, refused)
    activity.refused(reason)  # as it leaves the node
    ends = [(run.end, run.reason) for run in activity.now.runs if run.phases[-1][0] == "loading"]
    assert ends == [("refused", reason)]
    assert len(activity.now.runs) == len([run for run in activity.now.runs if run.phases])


def test_a_refusal_while_workers_start_leaves_their_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    activity = Activity()
    activity.starting(TWO)
    activity.refused(say("memory.raise", out="Take a smaller model", limit="CP_MEMORY_GIB"))
    clock.after(3)
    activity.joined({rank: Joined(bytes_per_second=0.0, flops_per_second=0.0) for rank in (0, 1)}, [""] * 2)
    assert [(run.end, [name for name, _ in run.phases]) for run in activity.now.runs] == [
        ("refused", []), ("idle", ["starting"])
    ]  # fmt: skip
