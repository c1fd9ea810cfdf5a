"""How long a silent rank is waited for, second by second."""

from __future__ import annotations

import math

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.group import waiting as waiting_module
from parallel_runtime.group.machines import limits_by_worker, seconds_from
from parallel_runtime.group.waiting import SilenceLimits
from parallel_runtime.wire.messages import Done, Heartbeat, Refusal

LOADS, SAMPLES, COMPILES = Heartbeat(1, loaded=0.5), Heartbeat(1), Heartbeat(1, busy="compiling")
STUCK = Heartbeat(1, advanced=False)
REFUSES = Done(1, refused=Refusal.of(Refused()))


@pytest.mark.parametrize("text", ["banana", "nan", "inf", "-1", "0", ""])
def test_a_limit_that_is_none_is_not_used(monkeypatch, text):
    monkeypatch.setenv("CP_STALL_SECONDS", text)
    assert seconds_from("CP_STALL_SECONDS", 120) == 120
    monkeypatch.setenv("CP_STALL_SECONDS", " 2.5 ")
    assert seconds_from("CP_STALL_SECONDS", 120) == 2.5
    monkeypatch.setenv("CP_IDLE_SECONDS", "0")
    assert seconds_from("CP_IDLE_SECONDS", 0) == 0


def test_a_bad_limit_of_memory_is_warned_about_once(monkeypatch, caplog):
    monkeypatch.setenv("CP_MEMORY_GIB", "8,plenty")
    assert [limits_by_worker("CP_MEMORY_GIB", "number of GiB", 2) for _ in range(3)] == [()] * 3
    assert caplog.text.count("CP_MEMORY_GIB='8,plenty' is not a number of GiB; it is ignored") == 1


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where the test says so."""
    now = [1000.0]
    monkeypatch.setattr(waiting_module.time, "monotonic", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


@pytest.fixture
def limits(clock):
    return SilenceLimits(2, load=600, stall=120, cancel=10)


def lost_after(limits, clock, seconds, waited_for=(0, 1)):
    """Nobody is lost a second before, and somebody is a second after."""
    clock(seconds - 1)
    assert limits.timed_out_rank(waited_for) is None
    clock(2)
    return limits.timed_out_rank(waited_for)


def test_a_rank_that_never_says_a_word_has_the_stall_limit(limits, clock):
    clock(1)
    limits.receive(0, LOADS)
    assert lost_after(limits, clock, 119) == (1, 121)


def test_a_rank_that_loads_has_the_load_limit(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, LOADS)
    assert lost_after(limits, clock, 600) is not None


def test_a_stall_limit_beyond_the_load_limit_holds_for_a_rank_that_samples(clock):
    limits = SilenceLimits(2, load=600, stall=3600, cancel=10)
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    assert lost_after(limits, clock, 3600) is not None


def test_a_cancelled_rank_has_the_remainder_of_a_step_as_long_as_those_of_requests_before(clock):
    limits = SilenceLimits(2, load=600, stall=120, cancel=10, longest_step=5.0)
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    limits.cancelled = True
    assert lost_after(limits, clock, 15) is not None


def test_a_rank_that_compiles_has_the_load_limit_and_the_stall_limit_after_it(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
        limits.receive(rank, COMPILES)
    clock(500)
    assert limits.timed_out_rank([0, 1]) is None
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    assert lost_after(limits, clock, 120) is not None


def test_a_cancel_is_not_expected_to_be_heard_by_a_rank_that_compiles(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, COMPILES)
    limits.cancelled = True
    assert lost_after(limits, clock, 120) is not None


def test_a_rank_that_samples_has_the_stall_limit_and_the_longest_silent_one_is_named(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    clock(5)
    limits.receive(1, SAMPLES)
    assert lost_after(limits, clock, 120) == (0, 126)


def test_ranks_that_wait_for_one_whose_device_computes_are_not_lost(limits, clock):
    for _ in range(300):
        clock(1)
        limits.receive(0, STUCK)
        limits.receive(1, SAMPLES)
        assert limits.timed_out_rank((0, 1)) is None


def test_ranks_that_are_alive_and_compute_nothing_are_lost(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    for _ in range(119):
        clock(1)
        limits.receive(0, STUCK)
        limits.receive(1, STUCK)
        assert limits.timed_out_rank((0, 1)) is None
    assert lost_after(limits, clock, 1) is not None


def test_a_stopped_process_is_named_and_not_the_rank_that_waits_for_it(limits, clock):
    for rank in (1, 0):
        limits.receive(rank, SAMPLES)
        clock(0.5)
    for _ in range(120):
        limits.receive(1, STUCK)
        clock(1)
    assert limits.timed_out_rank((0, 1)) == (0, 120.5)


def test_a_rank_that_waits_for_one_that_compiles_is_not_lost(limits, clock):
    limits.receive(0, SAMPLES)
    limits.receive(1, COMPILES)
    clock(500)
    assert limits.timed_out_rank((0, 1)) is None


def test_after_a_cancel_a_rank_has_one_step_and_ten_seconds(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    clock(40)
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    limits.cancelled = True
    assert lost_after(limits, clock, 50) is not None


def test_a_cancel_in_the_first_step_ends_no_group_that_works(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    limits.cancelled = True
    assert lost_after(limits, clock, 120) is not None


def test_a_cancel_while_loading_waits_ten_seconds(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, LOADS)
    limits.cancelled = True
    assert lost_after(limits, clock, 10) is not None


def test_after_a_refusal_a_rank_that_samples_has_ten_seconds_to_refuse_too(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    clock(100)
    limits.receive(0, REFUSES)
    clock(5)
    limits.receive(0, REFUSES)
    clock(-5)
    assert lost_after(limits, clock, 10, [1]) is not None


def test_a_rank_that_works_on_after_another_one_refused_is_no_longer_silent(limits, clock):
    for rank in (0, 1):
        limits.receive(rank, SAMPLES)
    limits.receive(0, REFUSES)
    for _ in range(5):
        clock(8)
        limits.receive(1, SAMPLES)
        assert limits.timed_out_rank([1]) is None
    assert lost_after(limits, clock, 10, [1]) is not None


@pytest.mark.parametrize("work", [LOADS, COMPILES], ids=["loads", "compiles"])
def test_after_a_refusal_a_rank_that_loads_or_compiles_is_waited_for_as_long_as_ever(limits, clock, work):
    for rank in (0, 1):
        limits.receive(rank, work)
    limits.receive(0, REFUSES)
    assert lost_after(limits, clock, 600, [1]) is not None


def test_ranks_that_have_answered_are_not_waited_for(limits, clock):
    clock(10_000)
    assert limits.timed_out_rank([]) is None


@pytest.mark.parametrize(
    ("text", "workers", "each"),
    [
        ("", 2, ()),
        ("0", 2, ()),
        ("8", 3, (8.0, 8.0, 8.0)),
        ("22, 10", 2, (22.0, 10.0)),
        ("0,10", 2, (math.inf, 10.0)),
        ("0,10", 3, (10.0, 10.0, 10.0)),
        ("22,10", 1, (10.0,)),
        ("22,ten", 2, ()),
    ],
)
def test_what_each_worker_may_have(monkeypatch, text: str, workers: int, each: tuple[float, ...]) -> None:
    monkeypatch.setenv("CP_MEMORY_GIB", text)
    assert limits_by_worker("CP_MEMORY_GIB", "number of GiB", workers) == each
