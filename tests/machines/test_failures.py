"""Two machines when one of them fails: the run ends with a name, nothing stays behind, the next group works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from parallel_runtime.errors import WorkerDied
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import Parallelism

from ..groups import flux_job
from .guest import joining
from .jobs import Once, difference, samples
from .network import FIRST, PORT, ROOT, SECOND, TOKEN, ULYSSES, on_two_machines

LOST_SECONDS = 12


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


@pytest.fixture
def guest(net, folder):
    """For one test: of two that wait, either may come into a group."""
    with joining(folder, namespace=net.second) as command:
        yield command


@pytest.fixture
def doomed(guest, flux):
    """A group that has sampled, for a test that breaks it."""
    group = WorkerGroup(on_two_machines())
    samples(group, flux, ULYSSES, steps=1)
    yield group
    group.close()


@pytest.mark.sweep  # tests/comfyui has it too
def test_a_killed_rank_of_the_other_machine_fails_the_run_at_once_and_the_next_group_works(doomed, guest, flux):
    kill = Once(lambda: guest.workers()[1].kill())
    with pytest.raises(WorkerDied, match=rf"worker rank 1 \(cpu\) on {SECOND} was killed by SIGKILL"):
        doomed.run(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
    assert time.monotonic() - kill.at < 2
    assert not doomed.alive
    with WorkerGroup(on_two_machines()) as group:
        samples(group, flux, ULYSSES)


@pytest.mark.sweep
def test_a_killed_rank_of_comfyuis_machine_is_named_without_an_address(doomed, guest, flux):
    kill = Once(lambda: os.kill(doomed.pids[0], signal.SIGKILL))
    with pytest.raises(WorkerDied, match=r"worker rank 0 \(cpu\) was killed by SIGKILL"):
        doomed.run(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
    assert time.monotonic() - kill.at < 2
    wait_until(lambda: not guest.started(), 3)


@pytest.mark.sweep
def test_a_killed_join_command_leaves_no_process_and_the_next_group_waits_for_the_next(net, flux, folder):
    with joining(folder, namespace=net.second) as first:
        group = WorkerGroup(on_two_machines())
        kill = Once(first.process.kill)
        with pytest.raises(WorkerDied, match=rf"worker rank 1 \(cpu\) on {SECOND} went away"):
            group.run(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
        assert time.monotonic() - kill.at < 3
        wait_until(lambda: not first.started(), 3)
    with joining(folder, namespace=net.second), WorkerGroup(on_two_machines()) as group:
        samples(group, flux, ULYSSES)


@pytest.mark.sweep
def test_a_machine_that_is_silently_gone_fails_the_run_and_its_workers_end(net, doomed, guest, flux):
    pull = Once(lambda: net.cable("down"))
    try:
        with pytest.raises(WorkerDied, match=rf"worker rank 1 \(cpu\) on {SECOND} went away"):
            doomed.run(flux, ULYSSES, flux_job(steps=100_000), on_step=pull)
        assert time.monotonic() - pull.at < LOST_SECONDS
        doomed.close()
        wait_until(lambda: not guest.started(), LOST_SECONDS)
    finally:
        net.cable("up")
    with WorkerGroup(on_two_machines()) as group:
        samples(group, flux, ULYSSES)


@pytest.mark.sweep
def test_a_killed_host_leaves_no_worker_on_the_other_machine(guest, flux, tmp_path):
    script = tmp_path / "host.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.groups import *\n"
        "from parallel_runtime.group.worker_group import WorkerGroup\n"
        f"group = WorkerGroup(Placement(devices=('cpu',), nnodes=2, rdzv_endpoint='{FIRST}:{PORT}'))\n"
        f"group.run(spec_of({flux.files[0].path!r}), Parallelism(ulysses_degree=2), flux_job(steps=100000),\n"
        "    on_step=lambda step, *_: print(flush=True) if step == 2 else None)\n"
    )
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert host.stdout is not None
    assert host.stdout.readline()
    assert len(guest.workers()) == 1
    host.kill()
    host.wait()
    wait_until(lambda: not guest.started(), 3)
    assert guest.process.poll() is None


@pytest.mark.sweep
def test_two_workers_on_each_of_two_machines_draw_what_one_draws(alone, guest, flux):
    job = {"size": (7, 11), "tokens": 5, "negative_tokens": 2, "batch": 2}
    one = samples(alone, flux, Parallelism(), **job)
    with WorkerGroup(on_two_machines(2)) as group:
        assert sorted(guest.workers()) == [2, 3]
        for parallelism in (Parallelism(ring_degree=2, ulysses_degree=2), Parallelism(data_degree=2, cfg_degree=2)):
            assert difference(samples(group, flux, parallelism, **job), one) < 2e-5, parallelism


@pytest.mark.sweep
def test_a_stopped_join_command_takes_its_workers_along(net, flux, folder):
    with joining(folder, namespace=net.second) as guest:
        with WorkerGroup(on_two_machines()) as group:
            guest.process.send_signal(signal.SIGINT)
            assert guest.process.wait(5) == 0
            wait_until(lambda: not guest.started(), 3)
            wait_until(lambda: not group.alive, 3)
        assert "Traceback" not in guest.output()
    assert TOKEN not in guest.output()
