"""What a running job says and hears between two evaluations of the model: beats, steps, the cancel vote."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..wire.bundles import write_bundle
from ..wire.channel import Channel
from ..wire.messages import Beat, Cancel, Step
from ..wire.readings import Busy, Readings
from .engine.mesh import World
from .engine.moments import HostMoment, Lead, Moment, Now, Standstill
from .ranks import agree, apart, rank

BEAT_SECONDS = 1.0
WATCHED = (0, 2, 4)  # steps of a run; the second may be recorded. To watch all of them would cost what it shows
DEBUG = os.environ.get("CP_DEBUG", "0") not in ("", "0")


class Cancelled(Exception):
    """Every rank raises it at the same evaluation."""


class Pulse:
    """`now` tells the time of this rank's device, `world` how long it stood still for others, and whether the ranks'
    devices are of several kinds, whose latents have to be compared."""

    def __init__(
        self,
        channel: Channel,
        job: int,
        readings: Callable[[], Readings | None] = lambda: None,
        *,
        now: Now = HostMoment,
        world: World | None = None,
    ) -> None:
        self._channel = channel
        self._job = job
        self._readings = readings
        self._now = now
        self._lead = Lead(now)
        self._steps: deque[Moment] = deque()  # the last whose time was told, and those that are under way
        self._step_seconds = 0.0
        self._waited_seconds: float | None = None
        self._computed: list[float] = []  # seconds of each step that this rank did not wait in
        self._world = world or World()
        self._world.standstill = None
        self._watched: list[Standstill] = []
        self._waited_before = self._world.waited_seconds
        self._cancelled = False
        self._last_beat = 0.0
        self._phase: tuple[bool, Busy] = (True, "")  # is it loading, what is it busy with?
        self._busy: Busy = ""
        self._previews = Previews()

    def readings(self) -> Readings | None:
        """This rank's, with the time that its last step took, and what of it was spent waiting for others."""
        self._time_steps()
        readings = self._readings()
        step, waited = self._step_seconds, self._waited_seconds
        seen = [seconds for one in self._watched if (seconds := one.computed_seconds) is not None]
        computed = statistics.median(self._computed or seen) if self._computed or seen else None
        if waited is None and computed is not None and step:
            waited = max(0.0, step - computed)
        return readings and replace(readings, step_seconds=step, waited_seconds=waited, computed_seconds=computed)

    def vote(self, agree: Callable[[bool], bool] = agree) -> None:
        """Call on every rank at the same places, or on all those that `agree` asks. Raises Cancelled on all of them or
        on none."""
        self.beat()
        if agree(self._heard_cancel()):
            raise Cancelled

    def beat(self) -> None:
        """Call where a run might have been silent for a while."""
        self._previews.flush()
        self._beat(None)

    def evaluating(self) -> None:
        """Call before each evaluation of the model: it may be launched when the one before the last has ended."""
        self.beat()
        self._lead.follow(self.beat)
        if not self._steps and self._world.standstill is None:
            self._watch(0)

    def loading(self, share: float) -> None:
        """Call while the model loads; acts on nothing, since ranks load at their own pace."""
        self._beat(share)

    def busy(self, what: Busy, begins: bool) -> None:
        """Call where torch.compile or the recording of a forward begins, and where it is done."""
        self._busy = what if begins else ""
        self._beat(None)

    def step(self, step: int, total: int, x0: Tensor, x: Tensor) -> None:
        """A sampler's callback. Dropped, not waited for, where the host is behind."""
        waited = self._world.waited_seconds
        if self._steps:
            self._waited_seconds = None if waited is None else waited - (self._waited_before or 0.0)
        self._waited_before = waited
        self._steps.append(self._now())
        self._time_steps()
        self._watch(step + 1)
        if self._waited_seconds is not None:
            self._computed.append(self._step_seconds - self._waited_seconds)
        if DEBUG or self._world.unlike:
            _check_equal(f"step {step + 1} of {total}", "latent", x0, x)
        if rank() == 0:
            self._previews.offer({"x0": x0, "x": x}, partial(self._send_step, Step(self._job, step, total)))

    def _watch(self, step: int) -> None:
        """From here on the device is in this step; what a host waits for it sees by itself."""
        if self._world.standstill is not None:
            self._world.standstill.end()
        self._world.standstill = None
        if step in WATCHED and self._now is not HostMoment:
            self._world.standstill = Standstill(self._now)
            self._watched.append(self._world.standstill)

    def _time_steps(self) -> None:
        """By when the device ended them: the host may have launched the next one already."""
        while len(self._steps) > 1 and self._steps[1].passed:
            self._step_seconds = self._steps[1].since(self._steps.popleft())

    def _send_step(self, step: Step, latents: dict[str, Tensor]) -> None:
        self._channel.offer(step, write_bundle(latents))

    def converted(self, frames: int, total: int) -> None:
        """So much of a video has gone through a VAE."""
        if rank() == 0:
            self._channel.offer(Step(self._job, frames, total))

    def evaluated(self, out: Tensor) -> None:
        """Call with what an evaluation gave where the sampler is not here, and reports no steps."""
        if DEBUG or self._world.unlike:
            _check_equal("an evaluation", "prediction", out)

    def _beat(self, loaded: float | None) -> None:
        """That loading is over, and what else it is busy with, is said at once: by that the host waits."""
        now, phase = time.monotonic(), (loaded is not None, self._busy)
        due = now - self._last_beat > BEAT_SECONDS or phase != self._phase
        if due and self._channel.offer(Beat(self._job, loaded, self.readings(), self._busy)):
            self._last_beat, self._phase = now, phase

    def _heard_cancel(self) -> bool:
        while not self._cancelled and self._channel.waiting():
            message, bundle = self._channel.receive()
            if bundle is not None:
                os.close(bundle)
            self._cancelled = isinstance(message, Cancel) and message.job == self._job
        return self._cancelled


class Previews:
    """The latents of a step on their way to the host, without making the device wait: they leave when they are here.

    At most one is on its way: a step that comes meanwhile is dropped.
    """

    def __init__(self) -> None:
        self._arrived: Callable[[], bool] = lambda: False
        self._send: Callable[[], None] | None = None  # what is on its way

    def offer(self, latents: dict[str, Tensor], send: Callable[[dict[str, Tensor]], None]) -> None:
        """`send` is called with them in main memory: at once on the CPU, else by a later `offer` or `flush`."""
        self.flush()
        device = next(iter(latents.values())).device
        if self._send is not None:
            return
        if device.type == "cpu":
            send(latents)
            return
        copies = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for name, tensor in latents.items()
        }
        event = torch.Event(device=device)
        event.record()
        self._arrived, self._send = event.query, partial(send, copies)

    def flush(self) -> None:
        """Send what has arrived."""
        if self._send is not None and self._arrived():
            send, self._send = self._send, None
            send()


def _check_equal(after: str, what: str, *tensors: Tensor) -> None:
    """Raises on every rank where one holds other tensors than rank 0, to the bit. Collective."""
    own = hashlib.sha256()
    for tensor in tensors:
        own.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    if others := apart(own.digest()):
        raise RuntimeError(
            f"after {after} the {what} of rank {', '.join(map(str, others))} differs from that of rank 0"
        )
