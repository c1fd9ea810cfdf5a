"""What a running job says and hears between two evaluations of the model: beats, steps, the cancel vote."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..wire.bundles import write_bundle
from ..wire.channel import Channel
from ..wire.messages import Beat, Cancel, Step
from ..wire.readings import Readings
from .engine.exchange import clock
from .preview import Previews
from .ranks import agree, everybodys, rank

BEAT_SECONDS = 1.0
DEBUG = os.environ.get("CP_DEBUG", "0") not in ("", "0")


class Cancelled(Exception):
    """Every rank raises it at the same evaluation."""


class Pulse:
    """`unlike`: the ranks' devices are of several kinds, and might draw other random numbers: compare their latents."""

    def __init__(
        self,
        channel: Channel,
        job: int,
        readings: Callable[[], Readings | None] = lambda: None,
        *,
        unlike: bool = False,
    ) -> None:
        self._channel = channel
        self._job = job
        self._readings = readings
        self._last_step = 0.0
        self._step_seconds = 0.0
        self._waited_seconds: float | None = None
        self._waited_before = clock.seconds
        self._cancelled = False
        self._last_beat = 0.0
        self._phase = (True, False)  # is it loading, is it compiling?
        self._compiling = False
        self._unlike = unlike
        self._previews = Previews()

    def readings(self) -> Readings | None:
        """This rank's, with the time that its last step took, and what of it was spent waiting for others."""
        readings = self._readings()
        step, waited = self._step_seconds, self._waited_seconds
        return readings and replace(readings, step_seconds=step, waited_seconds=waited)

    def vote(self, agree: Callable[[bool], bool] = agree) -> None:
        """Call on every rank at the same places, or on all those that `agree` asks. Raises Cancelled on all of them or
        on none."""
        self.beat()
        if agree(self._heard_cancel()):
            raise Cancelled

    def beat(self) -> None:
        """Call before each evaluation of the model."""
        self._previews.flush()
        self._beat(None)

    def loading(self, share: float) -> None:
        """Call while the model loads; acts on nothing, since ranks load at their own pace."""
        self._beat(share)

    def compiling(self, begins: bool) -> None:
        """Call where torch.compile begins, and where it is done."""
        self._compiling = begins
        self._beat(None)

    def step(self, step: int, total: int, x0: Tensor, x: Tensor) -> None:
        """A sampler's callback. Dropped, not waited for, where the host is behind."""
        now, waited = time.monotonic(), clock.seconds
        if self._last_step:
            self._step_seconds = now - self._last_step
            self._waited_seconds = None if waited is None else waited - (self._waited_before or 0.0)
        self._last_step, self._waited_before = now, waited
        if DEBUG or self._unlike:
            _check_equal(f"step {step + 1} of {total}", "latent", x0, x)
        if rank() == 0:
            self._previews.offer({"x0": x0, "x": x}, partial(self._send_step, Step(self._job, step, total)))

    def _send_step(self, step: Step, latents: dict[str, Tensor]) -> None:
        self._channel.offer(step, write_bundle(latents))

    def converted(self, frames: int, total: int) -> None:
        """So much of a video has gone through a VAE."""
        if rank() == 0:
            self._channel.offer(Step(self._job, frames, total))

    def evaluated(self, out: Tensor) -> None:
        """Call with what an evaluation gave where the sampler is not here, and reports no steps."""
        if DEBUG or self._unlike:
            _check_equal("an evaluation", "prediction", out)

    def _beat(self, loaded: float | None) -> None:
        """That loading or compiling is over is said at once: from then on the host waits for less long."""
        now, phase = time.monotonic(), (loaded is not None, self._compiling)
        due = now - self._last_beat > BEAT_SECONDS or phase != self._phase
        if due and self._channel.offer(Beat(self._job, loaded, self.readings(), self._compiling)):
            self._last_beat, self._phase = now, phase

    def _heard_cancel(self) -> bool:
        while not self._cancelled and self._channel.waiting():
            message, bundle = self._channel.receive()
            if bundle is not None:
                os.close(bundle)
            self._cancelled = isinstance(message, Cancel) and message.job == self._job
        return self._cancelled


def _check_equal(after: str, what: str, *tensors: Tensor) -> None:
    """Raises on every rank where one holds other tensors than rank 0, to the bit. Collective."""
    own = hashlib.sha256()
    for tensor in tensors:
        own.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    digests = everybodys(int.from_bytes(own.digest()[:7], "big"))
    if others := [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RuntimeError(f"after {after} the {what} of rank {', '.join(others)} differs from that of rank 0")
