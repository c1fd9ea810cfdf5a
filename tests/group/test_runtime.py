"""The one group of a process: borrowed, replaced when dead, started ahead, ended when idle."""

from __future__ import annotations

import os
import signal
import time

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.group import worker_group as group_module
from parallel_runtime.group.runtime import runtime
from parallel_runtime.specs import Parallelism, Placement

from ..groups import our_processes, samples, spec_of, wait_until, workers_of
from ..zoo.checkpoints import write


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


ONE = Placement(devices=("cpu",))


@pytest.mark.sweep
def test_a_dead_group_is_replaced_and_an_equal_one_is_kept(flux):
    try:
        with runtime.borrowed(ONE, None) as first:
            pass
        with runtime.borrowed(ONE, None) as again:
            assert again is first
        nobody = Placement(devices=("cpu",), nnodes=2, rdzv_endpoint="no..host:29500")
        with pytest.raises(Refused, match="nor the name of one"), runtime.borrowed(nobody, None):
            pass
        assert runtime.live is first, "a name that nobody knows costs no workers"
        assert runtime.profiles[ONE] == first.profile, "also when it is gone"
        os.kill(workers_of(first)[0], signal.SIGKILL)
        wait_until(lambda: not first.alive, 5)
        with runtime.borrowed(ONE, None) as second:
            assert second is not first
            samples(second, flux, Parallelism())
    finally:
        runtime.close()


@pytest.mark.parametrize(
    "death", [pytest.param(signal.SIGKILL, marks=pytest.mark.sweep), signal.SIGSTOP], ids=lambda death: death.name
)
def test_an_idle_worker_that_was_killed_a_moment_ago_or_is_stopped_costs_no_run(flux, death, monkeypatch, caplog):
    """A killed one counts as running until it is gone, a stopped one until it has been silent for too long."""
    monkeypatch.setattr(group_module, "ANSWER_SECONDS", 5)
    try:
        with runtime.borrowed(ONE, None) as first:
            samples(first, flux, Parallelism())
        os.kill(workers_of(first)[0], death)
        with runtime.borrowed(ONE, None) as second:
            samples(second, flux, Parallelism())
        assert second is not first
        assert runtime.status().state == "idle"
        if death is signal.SIGSTOP:
            assert any("has been silent for 5 s" in line.text for line in runtime.journal.tail())
            assert "has been silent for 5 s" in caplog.text
            assert not set(workers_of(first)) & our_processes().keys()
    finally:
        runtime.close()


def test_a_group_that_was_started_ahead_is_the_one_that_is_borrowed():
    try:
        runtime.start_ahead(ONE, None)
        wait_until(lambda: runtime.live is not None, 60)
        with runtime.borrowed(ONE, None) as group:
            pids = workers_of(group)
        runtime.start_ahead(Placement(devices=("cpu", "cpu")), None)
        time.sleep(0.5)
        with runtime.borrowed(ONE, None) as again:
            assert workers_of(again) == pids, "a live group gave way to one that nobody has asked for yet"
    finally:
        runtime.close()


def test_closing_does_not_wait_for_a_group_that_is_being_started():
    runtime.start_ahead(ONE, None)
    time.sleep(0.5)
    before = time.monotonic()
    runtime.close()
    assert time.monotonic() - before < 2
    assert runtime.live is None


def test_an_idle_group_ends_and_one_in_use_does_not(flux):
    runtime.idle_seconds = 0.5
    try:
        with runtime.borrowed(ONE, None) as group:
            time.sleep(1)
            assert group.alive
            samples(group, flux, Parallelism())
            pids = workers_of(group)
        with runtime.exclusive(group):  # as what another thread has begun goes on
            time.sleep(0.6)
            samples(group, flux, Parallelism())
        assert runtime.status().state == "idle"
        wait_until(lambda: runtime.status().state == "none", 10)
        assert not any(pid in our_processes() for pid in pids)
    finally:
        runtime.idle_seconds = 0
        runtime.close()
