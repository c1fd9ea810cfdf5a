"""What a running job says and hears between two evaluations of the model: beats, steps, the cancel vote."""

from __future__ import annotations

import os
import time

from torch import Tensor

from ..wire.bundles import write_bundle
from ..wire.channel import Channel
from ..wire.messages import Beat, Cancel, Step
from .ranks import agree, rank

BEAT_SECONDS = 1.0


class Cancelled(Exception):
    """Every rank raises it at the same evaluation."""


class Pulse:
    def __init__(self, channel: Channel, job: int) -> None:
        self._channel = channel
        self._job = job
        self._cancelled = False
        self._last_beat = 0.0

    def vote(self) -> None:
        """Call on every rank at the same places. Raises Cancelled on all of them or on none."""
        self.beat()
        if agree(self._heard_cancel()):
            raise Cancelled

    def beat(self) -> None:
        """Call before each evaluation of the model."""
        self._beat(None)

    def loading(self, share: float) -> None:
        """Call while the model loads; acts on nothing, since ranks load at their own pace."""
        self._beat(share)

    def step(self, step: int, total: int, x0: Tensor, x: Tensor) -> None:
        """A sampler's callback. Dropped, not waited for, where the host is behind."""
        if rank() == 0:
            self._channel.offer(Step(self._job, step, total), write_bundle({"x0": x0, "x": x}))

    def _beat(self, loaded: float | None) -> None:
        now = time.monotonic()
        if now - self._last_beat > BEAT_SECONDS:
            self._last_beat = now
            self._channel.offer(Beat(self._job, loaded))

    def _heard_cancel(self) -> bool:
        while not self._cancelled and self._channel.waiting():
            message, bundle = self._channel.receive()
            if bundle is not None:
                os.close(bundle)
            self._cancelled = isinstance(message, Cancel) and message.job == self._job
        return self._cancelled
