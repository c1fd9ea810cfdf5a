"""The one worker group of this process: started when first needed, replaced when it is dead or does not fit, ended
when nobody has used it for long enough."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import ParallelError, WorkerDied
from ..specs import ComfySetup, Placement, SourceFile
from .activity import Activity
from .choosing import Staffing
from .group import WorkerGroup
from .launch import POLL_SECONDS
from .limits import Limit, stall_limit
from .status import BUSY, RESTING, Status

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0


class Runtime:
    """All that outlives a group. There is one, `runtime`."""

    def __init__(self) -> None:
        self.group: WorkerGroup | None = None  # look at it; to use it borrow it
        self.stall = stall_limit()
        self.idle = Limit("CP_IDLE_SECONDS", 0)  # 0: never
        self.first_seen: WeakKeyDictionary[Any, tuple[SourceFile, ...]] = WeakKeyDictionary()  # of loaded networks
        self.staffing = Staffing()
        self._activity = Activity()
        self.history = self._activity.history
        self.journal = self._activity.journal  # what was printed and logged last
        self._lock = threading.RLock()  # who holds it may use the group, start or end it
        self._closing = threading.Event()
        self._used = 0.0  # last

    @property
    def live(self) -> WorkerGroup | None:
        """The group, if it lives."""
        group = self.group
        return group if group is not None and group.alive else None

    @contextmanager
    def borrowed(
        self, placement: Placement, comfy: ComfySetup | None, watch: Callable[[], None] = lambda: None
    ) -> Iterator[WorkerGroup]:
        """The live group for `placement`, which nobody else uses or ends meanwhile.

        `watch` is called while we wait for it; what it raises ends the waiting. Raises WorkerStartError.
        """

        def go_on() -> bool:
            watch()
            return True

        self._activity.wanted()
        with self._alone(go_on):
            try:
                yield self._current(placement, comfy, watch)
            finally:
                self._used = time.monotonic()

    @contextmanager
    def undisturbed(self, group: WorkerGroup) -> Iterator[WorkerGroup | None]:
        """`group` once nobody else uses or ends it; None where it has ended, also while we wait for that: who has the
        lock then starts another one, which may take minutes."""
        with self._alone(lambda: self.group is group) as alone:
            yield group if alone and self.live is group else None

    @contextmanager
    def resting(self) -> Iterator[WorkerGroup | None]:
        """The live group, which nobody else uses or ends meanwhile; None where there is none, or it is at work, also
        between two evaluations of a run."""
        with self._alone() as alone:
            yield self.live if alone and self._activity.now.state not in BUSY else None

    def start_ahead(self, placement: Placement, comfy: ComfySetup | None) -> None:
        """A prompt asks for it: start the group on a thread of its own, if none is alive. Whoever borrows it hears what
        goes wrong."""
        self._activity.wanted(by_prompt=True)
        self._start_aside(placement, comfy)

    def status(self) -> Status:
        """What the group is doing. Notices that an idle one has died, and ends one that was idle for long enough: ask a
        few times a second."""
        self._activity.rest()
        group = self.group
        if group is not None and self._activity.now.state in RESTING and not group.alive:
            with self._alone() as alone:
                if alone:
                    group.look()
        if self._unused:
            with self._alone() as alone:
                if alone and self._unused:
                    reason = f"ended after {float(self.idle):g} s without a run"
                    log.info("[CP] the workers are %s", reason)
                    self._close()
                    self._activity.ended(reason)
        return self._activity.now

    def restart(self, reason: str, comfy: ComfySetup | None) -> bool:
        """End the group, also under a run, which fails with `reason`; another like it starts on a thread of its own,
        also where one did not come up. False where there is none to restart, and none is starting.
        """
        group, now = self.group, self._activity.now
        self._activity.unwanted()
        if group is None:
            if now.state in ("died", "unstarted") and now.placement is not None:
                self._start_aside(now.placement, comfy)
                return True
            return now.state == "starting"

        def end_the_run() -> bool:
            group.kill(reason)
            return True

        with self._alone(end_the_run):
            if self.group is group:  # nobody has replaced it meanwhile
                self._close()
        self._start_aside(group.placement, group.comfy)
        return True

    def close(self) -> None:
        """End the group, if there is one; a run that uses it fails."""
        self._closing.set()
        free = self._lock.acquire(timeout=CLOSE_SECONDS)
        self._close()
        self._closing.clear()
        if free:
            self._lock.release()

    @property
    def _unused(self) -> bool:
        """There is a group, and for longer than it may."""
        idle = self.group is not None and self._activity.now.state not in BUSY
        return idle and 0 < float(self.idle) < time.monotonic() - self._used

    @contextmanager
    def _alone(self, go_on: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Nobody else uses, starts or ends the group meanwhile; False where somebody does, and `go_on` says to wait no
        longer."""
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if not go_on():
                yield False
                return
        try:
            yield True
        finally:
            self._lock.release()

    def _current(self, placement: Placement, comfy: ComfySetup | None, watch: Callable[[], None]) -> WorkerGroup:
        group = self.live
        if group is None or group.placement != placement or group.comfy != comfy or not self._answers(group, watch):
            self._close()
        if self.group is None:
            machines = f" on each of {placement.nnodes} machines" if placement.nnodes > 1 else ""
            log.info("[CP] starting %d worker(s): %s%s", placement.world_size, ", ".join(placement.devices), machines)
            self.group = WorkerGroup(placement, comfy, watch, self._activity, self.stall)
            self.staffing.learn(placement, self.group.link)
        return self.group

    def _answers(self, group: WorkerGroup, watch: Callable[[], None]) -> bool:
        """A worker that was killed while nobody used it counts as running until it is gone."""
        if self._activity.now.state not in BUSY:
            with contextlib.suppress(WorkerDied):
                group.measure(watch)
        return group.alive

    def _start_aside(self, placement: Placement, comfy: ComfySetup | None) -> None:
        threading.Thread(target=self._start_ahead, args=(placement, comfy), name="start workers", daemon=True).start()

    def _start_ahead(self, placement: Placement, comfy: ComfySetup | None) -> None:
        try:
            with self._alone() as alone:
                if alone and self.live is None:
                    self._current(placement, comfy, self._unless_closing)
                    self._used = time.monotonic()
        except ParallelError as error:
            log.debug("[CP] no workers started ahead: %s", error)

    def _unless_closing(self) -> None:
        if self._closing.is_set():
            raise ParallelError("ComfyUI is closing")

    def _close(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            group.close()
            self._activity.ended()


runtime = Runtime()
atexit.register(runtime.close)
