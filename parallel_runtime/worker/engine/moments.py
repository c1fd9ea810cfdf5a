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
