"""Processes die, stop, raise and deviate at every moment of a job: a named error in time, and nothing left behind."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_runtime.errors import Cause, WorkerDied, WorkerFailed
from parallel_runtime.group import worker_group as group_module
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import Parallelism
from parallel_runtime.worker import agent

from ..groups import (
    Stop,
    flux_job,
    on_cpu,
    our_processes,
    parent_of,
    sabotage,
    samples,
    spec_of,
    wait_until,
    workers_of,
)
from ..holdings import shared_files
from ..zoo.checkpoints import write

ULYSSES = Parallelism(ulysses_degree=2)

PLACES = ("load", "step", "gather", "reply")
DEEDS = {
    "SIGKILL": r"rank {rank} \(cpu\) was killed by SIGKILL",
    "SIGSTOP": r"rank {rank} \(cpu\) has been silent for \d+ s",
    "abort": r"rank {rank} \(cpu\) was killed by SIGABRT",
    "exit": r"rank {rank} \(cpu\) exited with code 3",
    "raise": r"rank {rank} \(cpu\) failed: RuntimeError: sabotage \(sabotage.py",
}
DEALT = [("gather", "abort"), ("reply", "SIGSTOP")]
FAULTS = list(itertools.product(PLACES, DEEDS)) if os.environ.get("CP_TEST_SWEEP") else DEALT


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


@pytest.fixture
def doomed():
    """A group of its own, for a test that kills it."""
    group = WorkerGroup(on_cpu(ULYSSES))
    yield group
    group.close()


def open_resources():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), shared_files()


@pytest.mark.parametrize(("place", "deed"), FAULTS)
def test_a_fault_of_one_rank_is_named_in_time_and_leaves_nothing(tmp_path, monkeypatch, flux, place, deed):
    rank = PLACES.index(place) % 2
    before = open_resources()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(group_module, "LOAD_SECONDS", 4.0)
    sabotage(monkeypatch, f"{rank} {place} {deed}")
    group = WorkerGroup(on_cpu(ULYSSES))
    group.stall = lambda: 3.0
    pids = [group._processes._torchrun.agent.pid, *workers_of(group)]
    started = time.monotonic()
    with pytest.raises((WorkerDied, WorkerFailed), match=DEEDS[deed].format(rank=rank)):
        group.run(flux, ULYSSES, flux_job())
    assert time.monotonic() - started < 10
    assert not group.alive
    assert not our_processes().keys() & {*pids}
    assert not list(tmp_path.iterdir())
    assert open_resources() == before


def test_a_killed_worker_fails_the_run_at_once_and_by_name(doomed, flux):
    samples(doomed, flux, ULYSSES)
    killed = 0.0

    def kill(step, *_):
        nonlocal killed
        if not killed:
            killed = time.monotonic()
            os.kill(workers_of(doomed)[1], signal.SIGKILL)

    with pytest.raises(WorkerDied, match=r"worker rank 1 \(cpu\) was killed by SIGKILL$"):  # memory has not run out
        doomed.run(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
    assert time.monotonic() - killed < 2
    assert not doomed.alive


def test_an_evaluation_longer_than_the_stall_limit_is_no_hang_as_long_as_blocks_end(monkeypatch, flux):
    """On a slow GPU an evaluation of a video takes minutes: what counts is whether the device gets on."""
    sabotage(monkeypatch, "0 tokens crawl;1 tokens crawl")
    with WorkerGroup(on_cpu(ULYSSES)) as group:
        group.stall = lambda: 2.0
        started = time.monotonic()
        assert samples(group, flux, ULYSSES, steps=1).isfinite().all()
        assert time.monotonic() - started > 2 * 2.0, "its evaluations were too short to show anything"


def test_main_memory_is_blamed_where_linux_has_killed_for_it(monkeypatch, tmp_path):
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(agent, "VMSTAT", str(vmstat))
    assert agent.out_of_memory_kills() == 0
    vmstat.write_text("nr_free_pages 12\noom_kill 3\n")
    assert agent.out_of_memory_kills() == 3
    full = Cause(kind="killed", rank=1, signal="SIGKILL", host_memory_full=True)
    assert "main memory ran out" in full.sentence("rank 1")
    assert "main memory" not in replace(full, signal="SIGSEGV").sentence("rank 1")
    assert "main memory" not in replace(full, host_memory_full=False).sentence("rank 1")


def test_a_stopped_worker_fails_the_run_within_the_stall_limit(doomed, flux):
    samples(doomed, flux, ULYSSES)
    doomed.stall = lambda: 2.0
    pids = workers_of(doomed)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 \(cpu\) has been silent for \d s"):
        doomed.run(flux, ULYSSES, flux_job(steps=100_000), on_step=lambda step, *_: os.kill(pids[1], signal.SIGSTOP))
    assert time.monotonic() - started < 15
    wait_until(lambda: not any(pid in our_processes() for pid in pids), 3)


def test_a_cancel_while_a_rank_hangs_is_not_kept_waiting_for_the_stall_limit(doomed, flux, monkeypatch):
    monkeypatch.setattr(group_module, "CANCEL_SECONDS", 1.0)
    stopped = 0.0

    def stop_a_rank(step, *_):
        nonlocal stopped
        if step == 3:
            stopped = time.monotonic()
            os.kill(workers_of(doomed)[1], signal.SIGSTOP)

    def cancel_a_little_later():
        if stopped and time.monotonic() - stopped > 0.3:
            raise Stop

    with pytest.raises(Stop):
        doomed.run(flux, ULYSSES, flux_job(steps=100_000), on_step=stop_a_rank, watch=cancel_a_little_later)
    assert time.monotonic() - stopped < 6
    assert not doomed.alive


@pytest.mark.sweep
def test_in_debug_mode_a_rank_whose_latent_deviates_is_found_at_its_step(monkeypatch, flux):
    monkeypatch.setenv("CP_DEBUG", "1")
    sabotage(monkeypatch, "1 evaluation deviate")  # the third evaluation, and each step has two
    with WorkerGroup(on_cpu(ULYSSES)) as group:
        samples(group, flux, ULYSSES, steps=1)
        with pytest.raises(WorkerFailed, match="after step 1 of 4 the latent of rank 1 differs from that of rank 0"):
            samples(group, flux, ULYSSES)


def test_an_exception_in_a_worker_names_rank_error_and_line(doomed, flux):
    job = flux_job()
    job.positive["c_crossattn"] = torch.randn(1, 7, 5)
    with pytest.raises(
        WorkerFailed, match=r"worker rank \d \(cpu\) failed: RuntimeError: .*shapes cannot be.*\.py:\d+"
    ):
        doomed.run(flux, ULYSSES, job)
    assert not doomed.alive


def test_a_worker_out_of_memory_says_what_it_held_and_what_to_change(doomed, flux):
    samples(doomed, flux, ULYSSES)
    pid = workers_of(doomed)[1]
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    with pytest.raises(
        WorkerFailed, match=r"rank 1 .*out of memory on cpu.* held FluxTransformer2DModel .* GiB of weights.*smaller"
    ):
        doomed.run(flux, ULYSSES, flux_job(size=(256, 256)))


def test_a_rank_that_hangs_while_idle_is_named_also_by_who_asks_next(doomed, flux, monkeypatch):
    samples(doomed, flux, ULYSSES)
    monkeypatch.setattr(group_module, "UNLOAD_SECONDS", 3.0)
    os.kill(workers_of(doomed)[1], signal.SIGSTOP)
    for ask in (lambda: doomed.free(flux), lambda: samples(doomed, flux, ULYSSES)):
        with pytest.raises(WorkerDied, match=r"rank 1 \(cpu\) has been silent for \d s"):
            ask()


def test_a_rank_that_died_between_two_requests_is_named_and_not_those_that_torchrun_ended_after_it(doomed, flux):
    samples(doomed, flux, ULYSSES)
    pids = workers_of(doomed)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not any(pid in our_processes() for pid in pids), 10)
    with pytest.raises(WorkerDied, match=r"rank 1 \(cpu\) was killed by SIGKILL"):
        samples(doomed, flux, ULYSSES)


def test_a_killed_rank_is_named_as_killed_also_where_torchrun_is_slow_to_say_so(doomed, flux):
    """On a busy machine its report takes longer than a second."""
    samples(doomed, flux, ULYSSES)
    agent_pid = doomed._processes._torchrun.agent.pid
    os.kill(agent_pid, signal.SIGSTOP)
    os.kill(workers_of(doomed)[0], signal.SIGKILL)
    goes_on = threading.Timer(3.0, os.kill, (agent_pid, signal.SIGCONT))
    goes_on.start()
    with pytest.raises(WorkerDied, match=r"worker rank 0 \(cpu\) was killed by SIGKILL"):
        samples(doomed, flux, ULYSSES)
    goes_on.join()


@pytest.mark.parametrize("torchrun", [pytest.param("runs", marks=pytest.mark.sweep), "is stopped"])
def test_the_host_being_killed_leaves_no_process(flux, tmp_path, torchrun):
    script = tmp_path / "host.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.groups import *\n"
        "from parallel_runtime.group.worker_group import WorkerGroup\n"
        "parallelism = Parallelism(ulysses_degree=2)\n"
        "group = WorkerGroup(on_cpu(parallelism))\n"
        f"group.run(spec_of({flux.files[0].path!r}), parallelism, flux_job(steps=100000),\n"
        "    on_step=lambda step, *_: print(*workers_of(group), flush=True) if step == 2 else None)\n"
    )
    (scratch := tmp_path / "scratch").mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment)
    assert host.stdout is not None
    pids = [int(pid) for pid in host.stdout.readline().split()]
    assert len(pids) == 2
    assert set(pids) <= our_processes().keys()
    agents = {parent_of(pid) for pid in pids}
    if torchrun == "is stopped":
        os.kill(*agents, signal.SIGSTOP)
    host.kill()
    host.wait()
    wait_until(lambda: not (our_processes().keys() & {*pids, *agents}), 10)
    wait_until(lambda: not list(scratch.glob("cp-*")), 3)


@pytest.mark.sweep
def test_torchrun_being_killed_is_named_and_leaves_no_process(doomed, flux):
    samples(doomed, flux, ULYSSES)
    pids = workers_of(doomed)
    os.kill(doomed._processes._torchrun.agent.pid, signal.SIGKILL)
    wait_until(lambda: not any(pid in our_processes() for pid in pids), 3)
    with pytest.raises(WorkerDied, match="went away with torchrun, which was killed by SIGKILL"):
        doomed.run(flux, ULYSSES, flux_job())
