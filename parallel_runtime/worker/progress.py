"""Messages of a running job between two evaluations of the model: heartbeats, steps, and the vote to cancel."""

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..engine.comm import ranks
from ..engine.comm.collectives import any_rank, differing_ranks
from ..engine.comm.mesh import GroupState, MeshDim
from ..wire.bundles import write_bundle
from ..wire.channel import Channel
from ..wire.messages import Busy, Cancel, Heartbeat, Readings, Step

HEARTBEAT_SECONDS = 1.0
TIMED_STEPS = (0, 2, 4)  # steps whose communication is timed: it costs time, and step 1 may be recorded
DEBUG = os.environ.get("CP_DEBUG", "0") not in ("", "0")


class Cancelled(Exception):
    """Every rank raises it at the same evaluation."""


class Progress:
    """The progress of one job on this rank. `now` makes events of its device; `group_state` has seconds waited in
    communication, and whether the ranks' devices are of several kinds, whose latents have to be compared."""

    def __init__(
        self, channel: Channel, job: int, readings: Callable[[], Readings], group_state: GroupState,
        now: ranks.EventFactory = ranks.HostEvent,
    ) -> None:  # fmt: skip
        self._channel = channel
        self._job = job
        self._readings = readings
        self._now = now
        self._throttle = ranks.LaunchThrottle(now)
        self._steps: deque[ranks.DeviceEvent] = deque()  # the ends of the last timed step and of those after it
        self._step_seconds = 0.0
        self._waited_seconds: float | None = None
        self._computed_seconds: list[float] = []  # of each step, without waiting
        self._group_state = group_state
        self._group_state.comm_timer = None
        self._timers: list[ranks.CommTimer] = []
        self._waited_before = self._group_state.waited_seconds
        self._cancelled = False
        self._last_heartbeat = 0.0
        self._phase: tuple[bool, Busy] = (True, "")  # of the last heartbeat: whether it was loading, and its `busy`
        self._busy: Busy = ""
        self._previews = Previews()

    def readings(self) -> Readings:
        """Returns this rank's readings, with the seconds of its last step and how many of them it waited for others."""
        self._time_steps()
        step, waited = self._step_seconds, self._waited_seconds
        timed = [seconds for timer in self._timers if (seconds := timer.computed_seconds) is not None]
        computed = statistics.median(self._computed_seconds or timed) if self._computed_seconds or timed else None
        if waited is None and computed is not None and step:
            waited = max(0.0, step - computed)
        return replace(self._readings(), step_seconds=step, waited_seconds=waited, computed_seconds=computed)

    def vote(self, dim: MeshDim | None = None) -> None:
        """Raises Cancelled on all ranks of `dim`, or of the group, or on none. Call it on all of them together."""
        self.heartbeat()
        while not self._cancelled and self._channel.waiting():
            message, bundle = self._channel.receive()
            if bundle is not None:
                os.close(bundle)
            self._cancelled = isinstance(message, Cancel) and message.job == self._job
        if any_rank(self._cancelled, dim):
            raise Cancelled

    def heartbeat(self) -> None:
        """Sends a heartbeat if one is due, and previews that have arrived. Call it wherever a run takes long."""
        self._previews.flush()
        self._send_heartbeat(None)

    @contextmanager
    def reporting_blocks(self, blocks: ranks.BlockCounter) -> Iterator[None]:
        """Sends a heartbeat each HEARTBEAT_SECONDS of this context: has the device computed a block?"""
        over = threading.Event()

        def report() -> None:
            with suppress(OSError):  # the host is gone, which ends this process
                while not over.wait(HEARTBEAT_SECONDS):
                    self._channel.offer(Heartbeat(self._job, busy=self._busy, advanced=blocks.have_advanced()))

        thread = threading.Thread(target=report, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def before_evaluation(self) -> None:
        """Waits until the evaluation before the last has ended. Call it before each evaluation of the model."""
        self.heartbeat()
        self._throttle.wait_for_turn(self._previews.flush)
        if not self._steps and not self._timers:
            self._start_timer(0)

    def loading(self, share: float) -> None:
        """Reports the share that is loaded. It never raises Cancelled, since ranks load at different speeds."""
        self._send_heartbeat(share)

    def busy(self, what: Busy, begins: bool) -> None:
        """Reports that torch.compile or the recording of a forward `begins`, or ends."""
        self._busy = what if begins else ""
        self._send_heartbeat(None)

    def step(self, step: int, total: int, x0: Tensor, x: Tensor) -> None:
        """Reports a step, as a sampler's callback. Drops it where the host has not read the last one yet."""
        waited = self._group_state.waited_seconds
        if self._steps:
            self._waited_seconds = None if waited is None else waited - (self._waited_before or 0.0)
        self._waited_before = waited
        self._steps.append(self._now())
        self._time_steps()
        self._start_timer(step + 1)
        if self._waited_seconds is not None:
            self._computed_seconds.append(self._step_seconds - self._waited_seconds)
        self.compare_ranks(f"step {step + 1} of {total}", "latent", x0, x)
        if ranks.rank() == 0:
            send = partial(self._channel.offer, Step(self._job, step, total))
            self._previews.offer({"x0": x0, "x": x}, lambda latents: send(write_bundle(latents)))

    def compare_ranks(self, after: str, what: str, *tensors: Tensor) -> None:
        """Raises RuntimeError on all ranks if tensors of unlike devices, or with CP_DEBUG, differ. Collective."""
        if not DEBUG and not self._group_state.heterogeneous:
            return
        if differing := differing_ranks(*tensors):
            others = ", ".join(map(str, differing))
            raise RuntimeError(f"after {after} the {what} of rank {others} differs from that of rank 0")

    def _start_timer(self, step: int) -> None:
        """Ends the last step's timer and starts one for a timed step. On the CPU the host's clock shows the waiting."""
        if self._group_state.comm_timer is not None:
            self._group_state.comm_timer.end()
        self._group_state.comm_timer = None
        if step in TIMED_STEPS and self._now is not ranks.HostEvent:
            self._group_state.comm_timer = ranks.CommTimer(self._now)
            self._timers.append(self._group_state.comm_timer)

    def _time_steps(self) -> None:
        """Measures steps by when the device ended them, since the host may have launched the next one already."""
        while len(self._steps) > 1 and self._steps[1].query():
            self._step_seconds = ranks.seconds_between(self._steps.popleft(), self._steps[0])

    def report_done(self, done: int, total: int) -> None:
        """Reports how many frames of a video, or tokens of a text, are done. Call it on one rank."""
        self._channel.offer(Step(self._job, done, total))

    def _send_heartbeat(self, loaded: float | None) -> None:
        """Sends a heartbeat if one is due, or at once when the phase has changed: the host's timeouts depend on it."""
        now, phase = time.monotonic(), (loaded is not None, self._busy)
        due = now - self._last_heartbeat > HEARTBEAT_SECONDS or phase != self._phase
        if due and self._channel.offer(Heartbeat(self._job, loaded, self.readings(), self._busy)):
            self._last_heartbeat, self._phase = now, phase


class Previews:
    """Sends a step's latents to the host without making the device wait: once their copy is in main memory.

    One copy is pending at most: a step that comes meanwhile is dropped."""

    def __init__(self) -> None:
        self._arrived: Callable[[], bool] = lambda: False
        self._send: Callable[[], object] | None = None  # sends the pending copy

    def offer(self, latents: dict[str, Tensor], send: Callable[[dict[str, Tensor]], object]) -> None:
        """Calls `send` with the latents in main memory: at once on the CPU, else in a later `offer` or `flush`."""
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
        """Sends the pending copy if it has arrived."""
        if self._send is not None and self._arrived():
            send, self._send = self._send, None
            send()
