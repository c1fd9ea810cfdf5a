"""A worker group answers, cancels, fails and ends as it promises. Real processes, CPU and gloo, no ComfyUI."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parallel_runtime.errors import Refused, WorkerDied, WorkerFailed, WorkerStartError
from parallel_runtime.host import group as group_module
from parallel_runtime.host.group import WorkerGroup
from parallel_runtime.host.launch import Processes
from parallel_runtime.host.runtime import close_group, current_group
from parallel_runtime.specs import ComfySetup, Parallelism, Placement
from parallel_runtime.wire.messages import Beat, Ready, encode

from .groups import flux_job, listening_addresses, on_cpu, our_processes, spec_of, workers_of
from .tiny import write

ULYSSES = Parallelism(ulysses_degree=2)
RING = Parallelism(ring_degree=2)


class Stop(BaseException):
    """Like ComfyUI's interrupt, no Exception."""


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


@pytest.fixture(scope="module")
def other_flux(tmp_path_factory):
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell", seed=99))


@pytest.fixture(scope="module")
def alone(flux):
    """What one worker makes of the job that the others are asked for."""
    with WorkerGroup(on_cpu(Parallelism())) as group:
        yield group


@pytest.fixture(scope="module")
def pair():
    with WorkerGroup(on_cpu(ULYSSES)) as group:
        yield group


@pytest.fixture
def doomed():
    """A group of its own, for a test that kills it."""
    group = WorkerGroup(on_cpu(ULYSSES))
    yield group
    group.close(gently=False)


def samples(group, model, parallelism, **job):
    return group.sample(model, parallelism, flux_job(**job)).value["samples"]


def difference(a, b):
    return ((a - b).abs().max() / b.std()).item()


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


@pytest.mark.parametrize("parallelism", [ULYSSES, RING], ids=["ulysses", "ring"])
@pytest.mark.parametrize(("size", "tokens"), [((8, 8), 8), ((7, 11), 7), ((3, 5), 1)])
def test_two_workers_draw_what_one_draws(alone, pair, flux, parallelism, size, tokens):
    one = samples(alone, flux, Parallelism(), size=size, tokens=tokens)
    two = samples(pair, flux, parallelism, size=size, tokens=tokens)
    assert difference(two, one) < 2e-5


@pytest.mark.parametrize(
    "lanes", [Parallelism(cfg_degree=2), Parallelism(data_degree=2)], ids=["branches of guidance", "rows of a batch"]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_two_lanes_draw_what_one_worker_draws(alone, pair, flux, lanes, batch):
    one = samples(alone, flux, Parallelism(), batch=batch, negative_tokens=12)
    two = samples(pair, flux, lanes, batch=batch, negative_tokens=12)
    assert difference(two, one) < 2e-5


FOUR = [
    Parallelism(ring_degree=2, ulysses_degree=2),
    Parallelism(cfg_degree=2, ring_degree=2),
    Parallelism(data_degree=2, cfg_degree=2),
]


@pytest.mark.parametrize(
    "parallelisms", [[Parallelism(ring_degree=3), Parallelism(data_degree=3)], FOUR], ids=["3 workers", "4 workers"]
)
def test_more_workers_draw_what_one_draws(alone, flux, parallelisms):
    job = {"size": (7, 11), "tokens": 5, "negative_tokens": 2, "batch": 2}
    one = samples(alone, flux, Parallelism(), **job)
    with WorkerGroup(on_cpu(parallelisms[0])) as group:
        for parallelism in parallelisms:
            assert difference(samples(group, flux, parallelism, **job), one) < 2e-5, parallelism


def test_only_what_changed_is_loaded_again(pair, flux, other_flux):
    def load_seconds(model, parallelism):
        return pair.sample(model, parallelism, flux_job()).load_seconds

    pids = workers_of(pair)
    first = samples(pair, flux, ULYSSES)
    assert load_seconds(flux, ULYSSES) < 0.02
    assert load_seconds(flux, RING) < 0.1
    other = samples(pair, other_flux, ULYSSES)
    assert difference(other, first) > 0.1
    assert torch.equal(samples(pair, flux, ULYSSES), first)
    assert workers_of(pair) == pids


def test_every_step_is_reported_in_order(pair, flux):
    steps = []
    pair.sample(flux, ULYSSES, flux_job(steps=6), on_step=lambda step, x0, x, total: steps.append((step, total)))
    assert steps == sorted(set(steps))
    assert steps[0] == (0, 6)
    assert steps[-1] == (5, 6)


@pytest.mark.parametrize("where", ["on_step", "watch"])
def test_an_interrupt_cancels_every_rank_and_the_group_stays_warm(pair, flux, where):
    before = samples(pair, flux, ULYSSES, steps=5)
    started = time.monotonic()

    def interrupt(*_):
        if time.monotonic() - started > 0.3:
            raise Stop

    with pytest.raises(Stop):
        pair.sample(flux, ULYSSES, flux_job(steps=100_000), **{where: interrupt})

    assert time.monotonic() - started < 5
    assert pair.alive
    assert torch.equal(samples(pair, flux, ULYSSES, steps=5), before)


def test_a_killed_worker_fails_the_run_at_once_and_by_name(doomed, flux):
    samples(doomed, flux, ULYSSES)
    killed = 0.0

    def kill(step, *_):
        nonlocal killed
        if not killed:
            killed = time.monotonic()
            os.kill(workers_of(doomed)[1], signal.SIGKILL)

    with pytest.raises(WorkerDied, match="rank 1 was killed by SIGKILL"):
        doomed.sample(flux, ULYSSES, flux_job(steps=100_000), on_step=kill)
    assert time.monotonic() - killed < 2
    assert not doomed.alive


def test_a_stopped_worker_fails_the_run_within_the_stall_limit(doomed, flux, monkeypatch):
    samples(doomed, flux, ULYSSES)
    monkeypatch.setattr(group_module, "STALL_SECONDS", 2.0)
    pids = workers_of(doomed)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 has not been heard of for \d s"):
        doomed.sample(flux, ULYSSES, flux_job(steps=100_000), on_step=lambda step, *_: os.kill(pids[1], signal.SIGSTOP))
    assert time.monotonic() - started < 15
    wait_until(lambda: not any(pid in our_processes() for pid in pids), 3)


def test_an_exception_in_a_worker_names_rank_error_and_line(doomed, flux):
    job = flux_job()
    job.positive["c_crossattn"] = torch.randn(1, 7, 5)
    with pytest.raises(WorkerFailed, match=r"worker rank \d failed: RuntimeError: .*shapes cannot be.*\.py:\d+"):
        doomed.sample(flux, ULYSSES, job)
    assert not doomed.alive


def test_a_checkpoint_that_changed_on_disk_is_not_sampled_with(doomed, tmp_path):
    spec = spec_of(write(tmp_path, "flux_schnell"))
    os.utime(spec.path, ns=(0, 0))
    with pytest.raises(WorkerFailed, match="changed on disk"):
        doomed.sample(spec, ULYSSES, flux_job())


def test_a_job_that_cannot_travel_is_refused_and_the_group_lives(pair, flux):
    job = flux_job()
    job.positive["control"] = object()
    with pytest.raises(Refused, match=r"positive\.control"):
        pair.sample(flux, ULYSSES, job)
    assert pair.alive
    samples(pair, flux, ULYSSES)


def test_a_dead_group_is_replaced_and_an_equal_one_is_kept(flux):
    try:
        first = current_group(Placement(devices=("cpu",)), None)
        assert current_group(Placement(devices=("cpu",)), None) is first
        os.kill(workers_of(first)[0], signal.SIGKILL)
        wait_until(lambda: not first.alive, 5)
        second = current_group(Placement(devices=("cpu",)), None)
        assert second is not first
        samples(second, flux, Parallelism())
    finally:
        close_group()


def test_the_host_being_killed_leaves_no_process(flux, tmp_path):
    script = tmp_path / "host.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from tests.groups import *\n"
        "from parallel_runtime.host.group import WorkerGroup\n"
        "parallelism = Parallelism(ulysses_degree=2)\n"
        "group = WorkerGroup(on_cpu(parallelism))\n"
        f"group.sample(spec_of({flux.path!r}), parallelism, flux_job(steps=100000),\n"
        "    on_step=lambda step, *_: print(*workers_of(group), flush=True) if step == 2 else None)\n"
    )
    (scratch := tmp_path / "scratch").mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment)
    assert host.stdout is not None
    pids = [int(pid) for pid in host.stdout.readline().split()]
    assert len(pids) == 2
    assert set(pids) <= our_processes().keys()
    agents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    host.kill()
    host.wait()
    wait_until(lambda: not (our_processes().keys() & {*pids, *agents}), 3)
    wait_until(lambda: not list(scratch.glob("cp-*")), 3)


def test_torchrun_being_killed_leaves_no_process(doomed, flux):
    samples(doomed, flux, ULYSSES)
    pids = workers_of(doomed)
    os.kill(doomed._processes._torchrun.agent.pid, signal.SIGKILL)
    wait_until(lambda: not any(pid in our_processes() for pid in pids), 3)
    with pytest.raises(WorkerDied):
        doomed.sample(flux, ULYSSES, flux_job())


def test_nothing_listens_beyond_loopback(pair, flux):
    samples(pair, flux, ULYSSES)
    pids = [*workers_of(pair), pair._processes._torchrun.agent.pid]
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    for address in listening_addresses(pids):
        assert address.startswith(loopback)


def test_a_closed_group_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    group = WorkerGroup(on_cpu(Parallelism()))
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    pids = workers_of(group)
    group.close()
    assert not list(tmp_path.iterdir())
    assert not any(pid in our_processes() for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_private_folder_with_a_very_long_path_will_do(tmp_path, monkeypatch, flux):
    (folder := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with WorkerGroup(on_cpu(Parallelism())) as group:
        samples(group, flux, Parallelism(), steps=1)
    assert not list(folder.glob("cp-*"))


@pytest.mark.parametrize("greeting", [b"rubbish", b'{"type": "Ready"}', Ready(0, 1, "tökén", "1", ()), Beat(1)])
def test_a_stranger_at_the_socket_is_shown_the_door(monkeypatch, greeting):
    meet = Processes.meet

    def with_a_stranger(self, *arguments):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(self._address)
        stranger.send(greeting if isinstance(greeting, bytes) else encode(greeting))
        try:
            return meet(self, *arguments)
        finally:
            assert stranger.recv(10) == b""
            stranger.close()

    monkeypatch.setattr(Processes, "meet", with_a_stranger)
    with WorkerGroup(on_cpu(Parallelism())) as group:
        assert group.alive


def test_a_group_that_cannot_start_says_why():
    with pytest.raises(WorkerStartError, match="No module named 'comfy'"):
        WorkerGroup(Placement(devices=("cpu",)), ComfySetup(root="/nowhere"))
