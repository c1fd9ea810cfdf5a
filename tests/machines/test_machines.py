"""Two machines, which are network namespaces here, sample one latent; and what they do when one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from parallel_runtime.errors import WorkerDied
from parallel_runtime.host.group import WorkerGroup
from parallel_runtime.specs import Parallelism

from ..groups import flux_job, on_cpu
from .guest import joining
from .network import HERE, PORT, ROOT, THERE, TOKEN, ULYSSES, on_two_machines

RING = Parallelism(ring_degree=2)
LOST_SECONDS = 12


def samples(group, model, parallelism, **job):
    return group.sample(model, parallelism, flux_job(**job)).value["samples"]


def difference(a, b):
    return ((a - b).abs().max() / b.std()).item()


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(net, flux):
    with WorkerGroup(on_cpu(Parallelism())) as group:
        yield group


@pytest.fixture(scope="module")
def pair(guest):
    with WorkerGroup(on_two_machines()) as group:
        yield group


@pytest.fixture
def doomed(guest, flux):
    """A group that has sampled, for a test that breaks it."""
    group = WorkerGroup(on_two_machines())
    samples(group, flux, ULYSSES, steps=1)
    yield group
    group.close(gently=False)


class Once:
    """Does something at the first step, and remembers when."""

    def __init__(self, action):
        self._action = action
        self.at = 0.0

    def __call__(self, *_):
        if not self.at:
            self.at = time.monotonic()
            self._action()


def test_the_first_rank_is_on_comfyuis_machine_and_the_other_on_the_other(pair, guest):
    assert list(guest.workers()) == [1]
    assert [pair._processes.machine_of(rank) for rank in range(2)] == ["", THERE]


@pytest.mark.parametrize("parallelism", [ULYSSES, RING, Parallelism(cfg_degree=2)], ids=["ulysses", "ring", "cfg"])
def test_two_machines_draw_what_one_worker_draws(alone, pair, flux, parallelism):
    job = {"size": (7, 11), "tokens": 5, "negative_tokens": 12}
    one = samples(alone, flux, Parallelism(), **job)
    assert difference(samples(pair, flux, parallelism, **job), one) < 2e-5


def test_everything_listens_on_the_address_that_was_named_or_on_the_machine_itself(net, pair, guest, flux):
    samples(pair, flux, RING)
    hexadecimal = {HERE: "01004D0A:", THERE: "02004D0A:"}
    for address, pid in ((HERE, os.getpid()), (THERE, guest.process.pid)):
        found = net.listening(pid)
        assert found, "gloo listens, at least"
        assert all(row.startswith((hexadecimal[address], "0100007F:")) for row in found), found


def test_a_cancel_stops_every_machine_and_the_group_stays_warm(pair, guest, flux):
    class Stop(BaseException):
        """Like ComfyUI's interrupt, no Exception."""

    def interrupt():
        raise Stop

    before = samples(pair, flux, ULYSSES, steps=5)
    workers = guest.workers()
    started = time.monotonic()
    with pytest.raises(Stop):
        pair.sample(flux, ULYSSES, flux_job(steps=100_000), on_step=Once(interrupt))
    assert time.monotonic() - started < 5
    assert guest.workers() == workers
    assert torch.equal(samples(pair, flux, ULYSSES, steps=5), before)


def test_unloaded_workers_load_again(pair, flux):
    before = samples(pair, flux, ULYSSES)
    pair.unload()
    assert torch.equal(samples(pair, flux, ULYSSES), before)


def test_a_killed_rank_of_the_other_machine_fails_the_run_at_once_and_the_next_group_works(doomed, guest, flux):
    kill = Once(lambda: guest.workers()[1].kill())
    with pytest.raises(WorkerDied, match=f"worker rank 1 on {THERE} was killed by SIGKILL"):
        doomed.sample(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
    assert time.monotonic() - kill.at < 2
    assert not doomed.alive
    with WorkerGroup(on_two_machines()) as group:
        samples(group, flux, ULYSSES)


def test_a_killed_rank_of_comfyuis_machine_is_named_without_an_address(doomed, guest, flux):
    kill = Once(lambda: os.kill(doomed._processes._pids[0], signal.SIGKILL))
    with pytest.raises(WorkerDied, match="worker rank 0 was killed by SIGKILL"):
        doomed.sample(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
    assert time.monotonic() - kill.at < 2
    wait_until(lambda: not guest.started(), 3)


def test_a_killed_join_command_leaves_no_process_and_the_next_group_waits_for_the_next(net, flux, folder):
    with joining(folder, namespace=net.there) as first:
        group = WorkerGroup(on_two_machines())
        kill = Once(first.process.kill)
        with pytest.raises(WorkerDied, match=f"worker rank 1 on {THERE} went away"):
            group.sample(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
        assert time.monotonic() - kill.at < 3
        wait_until(lambda: not first.started(), 3)
    with joining(folder, namespace=net.there), WorkerGroup(on_two_machines()) as group:
        samples(group, flux, ULYSSES)


def test_a_machine_that_is_silently_gone_fails_the_run_and_its_workers_end(net, doomed, guest, flux):
    pull = Once(lambda: net.cable("down"))
    try:
        with pytest.raises(WorkerDied, match=f"worker rank 1 on {THERE} went away"):
            doomed.sample(flux, ULYSSES, flux_job(steps=100_000), on_step=pull)
        assert time.monotonic() - pull.at < LOST_SECONDS
        doomed.close(gently=False)
        wait_until(lambda: not guest.started(), LOST_SECONDS)
    finally:
        net.cable("up")
    with WorkerGroup(on_two_machines()) as group:
        samples(group, flux, ULYSSES)


def test_a_killed_host_leaves_no_worker_on_the_other_machine(guest, flux, tmp_path):
    script = tmp_path / "host.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.groups import *\n"
        "from parallel_runtime.host.group import WorkerGroup\n"
        f"group = WorkerGroup(Placement(devices=('cpu',), nnodes=2, rdzv_endpoint='{HERE}:{PORT}'))\n"
        f"group.sample(spec_of({flux.path!r}), Parallelism(ulysses_degree=2), flux_job(steps=100000),\n"
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


def test_two_workers_on_each_of_two_machines_draw_what_one_draws(alone, guest, flux):
    job = {"size": (7, 11), "tokens": 5, "negative_tokens": 2, "batch": 2}
    one = samples(alone, flux, Parallelism(), **job)
    with WorkerGroup(on_two_machines(2)) as group:
        assert sorted(guest.workers()) == [2, 3]
        for parallelism in (Parallelism(ring_degree=2, ulysses_degree=2), Parallelism(data_degree=2, cfg_degree=2)):
            assert difference(samples(group, flux, parallelism, **job), one) < 2e-5, parallelism


def test_a_stopped_join_command_takes_its_workers_along(net, flux, folder):
    with joining(folder, namespace=net.there) as guest:
        with WorkerGroup(on_two_machines()) as group:
            guest.process.send_signal(signal.SIGINT)
            assert guest.process.wait(5) == 0
            wait_until(lambda: not guest.started(), 3)
            wait_until(lambda: not group.alive, 3)
        assert "Traceback" not in guest.said()
    assert TOKEN not in guest.said()
