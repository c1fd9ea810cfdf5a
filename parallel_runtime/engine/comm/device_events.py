"""Device events: an event is completed when all work launched before it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

POLL_SECONDS = 0.0005


class DeviceEvent(Protocol):
    @property
    def completed(self) -> bool: ...

    def wait(self) -> None:
        """Blocks until the event is completed."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Returns the device seconds between two completed events."""


EventFactory = Callable[[], DeviceEvent]


class HostEvent:
    """An event of the CPU, which is completed at once: the CPU computes as it is called."""

    completed = True

    def __init__(self) -> None:
        self.seconds = time.monotonic()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, HostEvent)
        return self.seconds - earlier.seconds


class _TorchEvent:
    """A torch.Event recorded in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.Event(device=device, enable_timing=True)
        self.event.record()

    @property
    def completed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _TorchEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def event_factory(device: torch.device) -> EventFactory:
    return HostEvent if device.type == "cpu" else partial(_TorchEvent, device)


class CommTimer:
    """Measures how long the device waits for transfers, from construction until `end`."""

    def __init__(self, make_event: EventFactory) -> None:
        self._make_event = make_event
        self._start = make_event()
        self._end: DeviceEvent | None = None
        self._waits: list[tuple[DeviceEvent, DeviceEvent]] = []

    def time_wait(self, wait: Callable[[], None]) -> None:
        """Runs and times a transfer's `wait`; while a CUDA graph is captured it is not timed."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            wait()
            return
        before = self._make_event()
        wait()
        self._waits.append((before, self._make_event()))

    def end(self) -> None:
        self._end = self._make_event()

    @property
    def computed_seconds(self) -> float | None:
        """Returns the device seconds spent computing, without communication; None until its events are completed, and
        where no transfer was timed, as in a graph replay."""
        if self._end is None or not self._waits or not self._end.completed:
            return None
        return self._end.seconds_since(self._start) - sum(after.seconds_since(before) for before, after in self._waits)


class LaunchThrottle:
    """Keeps the host at most one evaluation ahead of its device: otherwise progress and timings are wrong, and a
    cancel waits for all queued work."""

    def __init__(self, make_event: EventFactory) -> None:
        self._make_event = make_event
        self._start: DeviceEvent | None = None

    def wait_for_turn(self, on_poll: Callable[[], None]) -> None:
        """Waits, before each evaluation, until the evaluation before the last has ended, and calls `on_poll`
        every POLL_SECONDS until then."""
        event = self._make_event()
        while self._start is not None and not self._start.completed:
            on_poll()
            time.sleep(POLL_SECONDS)
        self._start = event
