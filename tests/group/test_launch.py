"""A group starts in a private place with workers of its own, or says why it does not. Real processes, no ComfyUI."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from parallel_runtime.errors import WorkerStartError
from parallel_runtime.group.launch import Processes
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
    meet = Processes.meet

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

    monkeypatch.setattr(Processes, "meet", with_strangers)
    with WorkerGroup(on_cpu(Parallelism())) as group:
        assert group.alive


def test_workers_of_another_version_are_refused_at_the_handshake(monkeypatch):
    meet = Processes.meet

    def with_an_old_worker(self, *arguments):
        worker = Channel.connect(self._address)
        worker.send(Ready(0, 1, self._token, "another"))
        return meet(self, *arguments)

    monkeypatch.setattr(Processes, "meet", with_an_old_worker)
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
