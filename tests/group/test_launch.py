"""A group starts in a private place with workers of its own, or says why it does not. Real processes, no ComfyUI."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime.accelerators import ACCELERATORS, CUDA
from parallel_runtime.errors import WorkerStartError
from parallel_runtime.group import launch
from parallel_runtime.group.activity import Activity
from parallel_runtime.group.launch import Processes
from parallel_runtime.group.torchrun import Torchrun
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ComfySetup, Parallelism, Placement
from parallel_runtime.wire.channel import Channel
from parallel_runtime.wire.messages import PROTOCOL, Heartbeat, Ready, encode

from ..groups import on_cpu, sabotage, samples, spec_of
from ..zoo.checkpoints import write


@pytest.mark.sweep
def test_a_private_folder_with_a_very_long_path_will_do(tmp_path, monkeypatch):
    (folder := Path(f"{tmp_path}{'/画 ünïcode' * 12}")).mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with WorkerGroup(on_cpu(Parallelism())) as group:
        samples(group, spec_of(write(tmp_path, "flux_schnell")), Parallelism(), steps=1)
    assert not list(folder.glob("cp-*"))


def test_strangers_at_the_socket_are_shown_the_door(monkeypatch):
    greetings = [b"rubbish", b'{"type": "Ready"}', encode(Ready(0, 1, "tökén", PROTOCOL)), encode(Heartbeat(1))]
    meet = Processes.start_and_connect

    def with_strangers(self, *arguments):
        self._server.listen(1 + len(greetings))  # for so many at once
        strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in greetings]
        for stranger, greeting in zip(strangers, greetings, strict=True):
            stranger.connect(self._address)
            stranger.send(greeting)
        try:
            return meet(self, *arguments)
        finally:
            assert [stranger.recv(10) for stranger in strangers] == [b""] * len(strangers)
            for stranger in strangers:
                stranger.close()

    monkeypatch.setattr(Processes, "start_and_connect", with_strangers)
    with WorkerGroup(on_cpu(Parallelism())) as group:
        assert group.alive


def test_workers_of_another_version_are_refused_at_the_handshake(monkeypatch):
    meet = Processes.start_and_connect

    def with_an_old_worker(self, *arguments):
        worker = Channel.connect(self._address)
        worker.send(Ready(0, 1, self._token, "another"))
        return meet(self, *arguments)

    monkeypatch.setattr(Processes, "start_and_connect", with_an_old_worker)
    with pytest.raises(WorkerStartError, match="files of CP Sampler changed while ComfyUI was running; restart"):
        WorkerGroup(on_cpu(Parallelism()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("nr_inodes=2", "no place for the workers' socket: .*No space left.*set TMPDIR"),
        ("size=4k", "No space left.*set TMPDIR"),
        ("ro", "no place for the workers' socket: .*Read-only file system.*set TMPDIR"),
    ],
    ids=["no room for a socket", "no room for a byte", "read-only"],
)
def test_a_full_or_read_only_disk_is_named_and_left_as_it_was(tmp_path, monkeypatch, options, says):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("NO MOUNT: only root can make a disk that is full")
    try:
        if "size" in options:
            (tmp_path / "full").write_bytes(bytes(4096))
        before = os.listdir(tmp_path)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with pytest.raises(WorkerStartError, match=says):
            WorkerGroup(on_cpu(Parallelism()))
        assert os.listdir(tmp_path) == before
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_group_that_cannot_start_says_why():
    with pytest.raises(WorkerStartError, match="No module named 'comfy'"):
        WorkerGroup(Placement(devices=("cpu",)), ComfySetup(root="/nowhere"))


def test_a_rank_that_is_killed_before_it_connects_is_named(monkeypatch):
    sabotage(monkeypatch, "1 connect SIGKILL")
    with pytest.raises(WorkerStartError, match=r"^worker rank 1 \(cpu\) was killed by SIGKILL.* while starting$"):
        WorkerGroup(on_cpu(Parallelism(ulysses_degree=2)))


def test_a_rank_that_is_killed_between_its_greeting_and_the_welcome_is_named(monkeypatch):
    welcome = Processes._welcome

    def too_late(self, comfy):
        os.kill(self.pids[0], signal.SIGKILL)
        assert self.channels[0].hung_up(20)
        welcome(self, comfy)

    monkeypatch.setattr(Processes, "_welcome", too_late)
    activity = Activity()
    with pytest.raises(WorkerStartError, match=r"^worker rank 0 \(cpu\) was killed by SIGKILL.* while starting"):
        WorkerGroup(on_cpu(Parallelism(ulysses_degree=2)), activity=activity)
    assert (activity.now.state, activity.now.loss.kind) == ("unstarted", "killed")


def test_a_torchrun_that_is_killed_before_its_ranks_are_up_is_named(monkeypatch):
    start = Torchrun.start

    def killed(self, *arguments, **options):
        start(self, *arguments, **options)
        self.agent.kill()

    monkeypatch.setattr(Torchrun, "start", killed)
    says = r"^worker rank 0 \(cpu\) went away with torchrun, which was killed by SIGKILL while starting$"
    with pytest.raises(WorkerStartError, match=says):
        WorkerGroup(on_cpu(Parallelism(ulysses_degree=2)))


def test_a_torchrun_that_another_thread_closed_has_ended():
    """ComfyUI ends at Ctrl-C while a sampling thread waits for its workers."""
    group = WorkerGroup(on_cpu(Parallelism()))
    processes = group._processes
    group.close()
    assert processes.died(0).cause is not None


def test_the_rank_that_failed_first_is_named_and_not_one_that_missed_it(monkeypatch):
    sabotage(monkeypatch, "1 start raise")
    with pytest.raises(WorkerStartError, match=r"rank 1 \(cpu\) could not start: RuntimeError: sabotage"):
        WorkerGroup(on_cpu(Parallelism(ulysses_degree=2)))


@pytest.fixture
def two_devices(monkeypatch):
    """Two CPU devices that exchange tensors by NCCL's transports, as far as the launch knows."""
    monkeypatch.setitem(ACCELERATORS, "cpu", replace(CUDA, kind="cpu"))
    monkeypatch.setattr(launch, "_transports_that_worked", {})
    monkeypatch.setattr(launch, "CONNECT_SECONDS", 3.0)
    for variable in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    return Placement(devices=("cpu:0", "cpu:1"))


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("hang=NCCL_P2P_DISABLE", "through shared memory.*NCCL_P2P_DISABLE=1"),
        ("fail=NCCL_SHM_DISABLE", "through sockets.*--shm-size=1g"),
        ("fail=", "through main memory"),
    ],
)
def test_where_a_transport_hangs_or_fails_a_slower_one_starts_and_is_named_once(
    monkeypatch, caplog, two_devices, fault, says
):
    sabotage(monkeypatch, f"1 join {fault}")
    with WorkerGroup(two_devices) as group:
        assert group.alive
    assert re.search(says, caplog.text)
    caplog.clear()
    with WorkerGroup(two_devices):
        assert not caplog.records, "what worked is kept, and said once"


def test_bytes_that_arrive_changed_are_noticed_before_a_picture_is_wrong(monkeypatch, caplog, two_devices):
    sabotage(monkeypatch, "0 received changed")
    with WorkerGroup(two_devices) as group:
        assert group.alive
    assert "what worker rank 0, 1 sent arrived changed" in caplog.text
    assert "IOMMU" in caplog.text


def test_what_the_user_switched_off_is_not_tried_twice_and_the_first_reason_is_told(monkeypatch, caplog, two_devices):
    for variable in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setitem(ACCELERATORS, "cpu", replace(CUDA, kind="cpu", slower_transports=CUDA.slower_transports[:2]))
    sabotage(monkeypatch, "1 join fail=")
    with pytest.raises(WorkerStartError, match="Error while creating shared memory segment"):
        WorkerGroup(two_devices)
    assert len(caplog.records) == 1, "one start, not three"
