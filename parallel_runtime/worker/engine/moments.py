"""Moments in the work of a device: one has passed when all that was launched before it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

LOOK_SECONDS = 0.0005


class Moment(Protocol):
    @property
    def passed(self) -> bool: ...

    def wait(self) -> None:
        """Until it has passed."""

    def since(self, earlier: Moment) -> float:
        """Seconds of the device; both have passed."""


Now = Callable[[], Moment]


class HostMoment:
    """What the CPU was told to do it has done."""

    passed = True

    def __init__(self) -> None:
        self.seconds = time.monotonic()

    def wait(self) -> None:
        pass

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, HostMoment)
        return self.seconds - earlier.seconds


class _DeviceMoment:
    """An event in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.Event(device=device, enable_timing=True)
        self.event.record()

    @property
    def passed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _DeviceMoment)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def now_on(device: torch.device) -> Now:
    """What makes a moment of this device."""
    return HostMoment if device.type == "cpu" else partial(_DeviceMoment, device)


class Standstill:
    """A while, from when it is made until `end`, and how long the device stood still in it for transfers."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._begun = now()
        self._ended: Moment | None = None
        self._around: list[tuple[Moment, Moment]] = []

    def around(self, wait: Callable[[], None]) -> None:
        """Of a transfer. What is captured has no time of its own."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            wait()
            return
        before = self._now()
        wait()
        self._around.append((before, self._now()))

    def end(self) -> None:
        self._ended = self._now()

    @property
    def computed_seconds(self) -> float | None:
        """Those in which it did not; None until all has passed, and where no transfer was seen, as in a replay."""
        if self._ended is None or not self._around or not self._ended.passed:
            return None
        return self._ended.since(self._begun) - sum(after.since(before) for before, after in self._around)


class Lead:
    """Keeps the host at most one evaluation ahead of its device: else progress and clocks lie, and a cancel waits for
    all that is queued."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._begun: Moment | None = None

    def follow(self, meanwhile: Callable[[], None]) -> None:
        """Call before each evaluation: returns when the one before the last has ended. `meanwhile` is called again and
        again until then."""
        here = self._now()
        while self._begun is not None and not self._begun.passed:
            meanwhile()
            time.sleep(LOOK_SECONDS)
        self._begun = here
