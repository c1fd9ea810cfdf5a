"""A host that launches faster than its device computes waits: progress, clocks and a cancel tell the truth."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest
import torch
from torch import nn

from parallel_runtime.engine.comm.collectives import Pending
from parallel_runtime.engine.comm.mesh import GroupState
from parallel_runtime.engine.comm.ranks import NOTED_BLOCKS, BlockCounter, HostEvent, LaunchThrottle
from parallel_runtime.wire.channel import Channel
from parallel_runtime.wire.messages import Cancel, Readings
from parallel_runtime.worker.progress import Cancelled, Progress

EVALUATION = 0.15  # seconds that the device needs for one
STEPS = 40


class Device:
    """Does one thing after the other, each when it is through with those before; whoever launches does not wait."""

    def __init__(self) -> None:
        self.free_at = time.monotonic()
        self.ahead = 0.0  # seconds of work that lay before it at most

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, time.monotonic()) + seconds
        self.ahead = max(self.ahead, self.free_at - time.monotonic())

    def now(self) -> Moment:
        return Moment(max(self.free_at, time.monotonic()))


class Moment:
    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))

    def elapsed_time(self, end: Moment) -> float:
        return 1e3 * (end.at - self.at)


class Rank:
    """A run of many steps, as a rank runs it, on such a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.host, self.device = Channel(ours), Device()
        self.progress = Progress(Channel(theirs), 7, lambda: Readings(0, 0), GroupState(), self.device.now)
        self.evaluations = 0

    def run(self) -> None:
        x = torch.zeros(1)
        for step in range(STEPS):
            self.progress.vote()
            self.progress.before_evaluation()
            self.device.launch(EVALUATION)
            self.evaluations += 1
            self.progress.step(step, STEPS, x, x)

    def cancel_after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.host.send, [Cancel(7)])
        timer.start()
        return timer


def test_a_cancel_is_heard_within_a_step_and_finds_no_more_than_one_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, began = Rank(monkeypatch), time.monotonic()
    rank.cancel_after(3.5 * EVALUATION)
    with pytest.raises(Cancelled):
        rank.run()
    rank.device.now().synchronize()  # all that was launched
    late = time.monotonic() - began - 3.5 * EVALUATION
    assert late < 2 * EVALUATION + 0.5
    assert rank.evaluations <= 6, "of forty"


def test_the_host_is_at_most_one_evaluation_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    lead = LaunchThrottle(device.now)
    waits = 0

    def meanwhile() -> None:
        nonlocal waits
        waits += 1

    for _ in range(6):
        lead.wait_for_turn(meanwhile)
        device.launch(EVALUATION)
    assert EVALUATION < device.ahead <= 2.2 * EVALUATION, "one runs, and one waits behind it: the device never idles"
    assert waits > 10, "a rank that waits for its device can say that it lives"


def test_a_step_takes_as_long_as_its_device_took(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    x = torch.zeros(1)
    for step in range(6):
        rank.progress.before_evaluation()
        rank.device.launch(EVALUATION)
        rank.progress.step(step, 6, x, x)
        if step > 3:
            assert rank.progress._step_seconds == pytest.approx(EVALUATION, rel=0.3)


def test_on_the_cpu_nobody_waits() -> None:
    lead, waits = LaunchThrottle(HostEvent), []
    for _ in range(3):
        lead.wait_for_turn(lambda: waits.append(1))
    assert waits == []


class Late:
    """A transfer that a device stands still for, as NCCL's: whoever launches does not wait."""

    def __init__(self, device: Device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def wait(self) -> None:
        self.device.launch(self.seconds)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
def test_how_long_a_device_computed_is_a_step_without_the_transfers_it_stood_still_for(
    monkeypatch: pytest.MonkeyPatch, replayed: bool
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    device, world, x = Device(), GroupState(), torch.zeros(1)
    _host, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    progress = Progress(Channel(rank), 7, lambda: Readings(0, 0), world, device.now)
    arriving = [torch.empty(1, device="meta")]
    for step in range(4):
        progress.before_evaluation()
        for _ in range(3):
            device.launch(0.01)
            transfer = Pending([Late(device, 0.02)], arriving, arriving, world)  # type: ignore[list-item]
            if not replayed:
                transfer.wait()
        progress.step(step, 4, x, x)
    device.now().synchronize()
    readings = progress.readings()
    assert readings is not None
    assert readings.computed_seconds == (None if replayed else pytest.approx(0.03, abs=0.015))
    assert readings.waited_seconds == (None if replayed else pytest.approx(0.06, abs=0.02)), "what the panel shows"


def with_blocks(count: int) -> nn.ModuleDict:
    return nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Identity()) for _ in range(count))})


@pytest.mark.parametrize("count", [1, 15, 16, 17, 57, 100])
def test_a_network_of_any_depth_advances_some_sixteen_times_in_an_evaluation(count: int) -> None:
    network, blocks, advanced = with_blocks(count), BlockCounter(torch.device("cpu")), 0
    blocks.watch(network)
    with torch.inference_mode():
        for block in network["blocks"]:
            block(torch.zeros(1))
            advanced += blocks.have_advanced()
    assert min(count, NOTED_BLOCKS) <= advanced < 2 * NOTED_BLOCKS
    assert not blocks.have_advanced(), "nothing was computed since"


@pytest.mark.gpu
def test_a_gpu_that_computes_for_long_advances_while_another_thread_waits_in_the_driver() -> None:
    """To pin memory waits for all work launched before it, and other calls of CUDA wait with it."""
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) / 128
    network, blocks, over, seen = with_blocks(8), BlockCounter(device), threading.Event(), []
    blocks.watch(network)

    def report() -> None:
        while not over.wait(0.1):
            seen.append((time.monotonic(), blocks.have_advanced()))

    thread = threading.Thread(target=report)
    begun, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    begun.record()
    for block in network["blocks"]:
        for _ in range(400):
            a = a @ a / 64
        block(a)
    end.record()
    launched = time.monotonic()
    thread.start()
    torch.empty(1 << 20, pin_memory=True)
    end.synchronize()
    over.set()
    thread.join()
    assert begun.elapsed_time(end) > 500, "too short to show anything"
    assert sum(advanced for _, advanced in seen) >= 4
    gaps = [after - before for before, after in itertools.pairwise([launched, *(at for at, _ in seen)])]
    assert max(gaps) < 0.5, "the thread was kept waiting"
