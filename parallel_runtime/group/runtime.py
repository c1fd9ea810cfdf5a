"""The one worker group of this process: started when first needed, replaced when it is dead or does not match, ended
when nobody has used it for long enough."""

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ParallelError, Refused, WorkerDied, say
from ..planning.run_plan import DeviceProfile, Speed
from ..specs import ComfySetup, Placement, SourceFile
from .activity import BUSY, RESTING, Activity, Status
from .launch import POLL_SECONDS
from .machines import parse_endpoint, seconds_from
from .worker_group import STALL_SECONDS, WorkerGroup

log = logging.getLogger(__name__)

NOISE = 1.5  # times as fast: two measurements of the same devices differ by less
CLOSE_SECONDS = 1.0
IDLE_SECONDS = seconds_from("CP_IDLE_SECONDS", 0)  # 0: an idle group never ends


# Also from one start of ComfyUI to the next: the noise of another measurement must not change how the same run is
# split, and with that its rounding.
class Measured:
    """The first DeviceProfile of each placement, until one differs by more than noise; kept in the file `path`."""

    def __init__(self) -> None:
        self.path = ""
        self._known: dict[str, DeviceProfile] = {}

    def settled(self, placement: Placement, measured: DeviceProfile) -> DeviceProfile:
        """Returns the remembered profile if `measured` is like it, else `measured`, which is remembered from now on."""
        name = f"{placement.nnodes} x {','.join(placement.devices)}"
        self._known |= self._read()
        if (known := self._known.get(name)) is not None:
            old_rates, rates = (pytree.tree_leaves(asdict(profile)) for profile in (known, measured))
            pairs = zip(old_rates, rates, strict=False)
            if len(old_rates) == len(rates) and all(max(pair) <= NOISE * min(pair) for pair in pairs):
                return known
        self._known[name] = measured
        if not self.path:
            return measured
        partial = f"{self.path}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(partial, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump({name: asdict(profile) for name, profile in self._known.items()}, file, indent=1)
            # At once: another ComfyUI of this user may read it meanwhile.
            os.replace(partial, self.path)
        except OSError as error:
            words = "[CP] %s cannot be written (%s): after a restart a run may be split otherwise"
            log.warning(words, self.path, error)
        return measured

    def _read(self) -> dict[str, DeviceProfile]:
        """Returns what the file has; nothing where there is none, or one that we have not written."""
        try:
            with open(self.path, encoding="utf-8") as file:
                profiles = json.load(file)
            speeds = {name: tuple(Speed(**speed) for speed in values["ranks"]) for name, values in profiles.items()}
            return {name: DeviceProfile(**{**profiles[name], "ranks": ranks}) for name, ranks in speeds.items()}
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return {}


class Runtime:
    """Everything that outlives a group. `runtime` is the only instance."""

    def __init__(self) -> None:
        self.group: WorkerGroup | None = None  # only to inspect; `borrowed` to use it
        self.stall_seconds = STALL_SECONDS
        self.idle_seconds = IDLE_SECONDS
        self.default_devices = ""  # of a VAE without a CP Parallel Config
        self.awaited = False  # a run uses the group, or waits for it
        self.first_seen: MutableMapping[Any, tuple[SourceFile, ...]] = WeakIdKeyDictionary()  # of loaded networks
        self.measured = Measured()
        self.profiles: dict[Placement, DeviceProfile] = {}  # of the groups that have met
        self.bytes_too_many: dict[tuple[Any, ...], int] = {}  # for a worker that ran out of memory, by model and size
        self.last_auto_placement: dict[Placement, Placement] = {}  # by all devices, those that auto chose last
        self._activity = Activity()
        self.history = self._activity.history
        self.journal = self._activity.journal  # what was printed and logged last
        self.refused = self._activity.refused  # a run was, for this reason
        self.recorded = self._activity.recorded
        self.end_evaluations = self._activity.end_evaluations
        self._lock = threading.RLock()  # needed to use, start or end the group
        self._closing = threading.Event()
        self._last_used_at = 0.0

    @property
    def live(self) -> WorkerGroup | None:
        """The group, if it lives."""
        group = self.group
        return group if group is not None and group.alive else None

    @contextmanager
    def borrowed(
        self, placement: Placement, comfy: ComfySetup | None, watch: Callable[[], None] = lambda: None
    ) -> Iterator[WorkerGroup]:
        """Yields the live group for `placement`, which no other thread uses or ends meanwhile, and whose readings are
        of this moment or, between two evaluations of a run, of the last one.

        `watch` is called while we wait for it; what it raises ends the waiting. Raises WorkerStartError, and Refused
        where a callback of this thread's own run asks."""
        self.awaited = True
        try:
            with self._locked(watch):
                if self.group is not None and self.group.in_run:
                    raise Refused("workers.busy")
                yield self._current(placement, comfy, watch)
        finally:
            self.awaited, self._last_used_at = False, time.monotonic()

    @contextmanager
    def exclusive(self, group: WorkerGroup) -> Iterator[WorkerGroup | None]:
        """Yields `group` once no other thread uses it; None if it has ended, also during the wait: the thread with the
        lock then starts another one, which may take minutes."""
        with self._locked(lambda: self.group is group) as acquired:
            yield group if acquired and self.live is group else None

    @contextmanager
    def idle_group(self) -> Iterator[WorkerGroup | None]:
        """Yields the live group, which no other thread uses or ends meanwhile; None if there is none or it is busy,
        also between two evaluations of a run."""
        with self._locked() as acquired:
            yield self.live if acquired and self._activity.now.state not in BUSY else None

    def start_ahead(self, placement: Placement, comfy: ComfySetup | None, *, queued: bool = True) -> None:
        """Starts the group on another thread, if none is alive, for a `queued` prompt or a later one. The run that
        borrows it gets the error of a failed start."""
        if queued:
            self.history.expect()

        def unless_closing() -> None:
            if self._closing.is_set():
                raise ParallelError(say("ended.closing"))

        def start() -> None:
            try:
                with self._locked() as acquired:
                    if acquired and self.live is None:
                        self._current(placement, comfy, unless_closing)
                        self._last_used_at = time.monotonic()
            except ParallelError as error:
                if not self._closing.is_set():
                    log.warning("[CP] workers did not start ahead of a run, which will start them again: %s", error)

        threading.Thread(target=start, name="start workers", daemon=True).start()

    def status(self) -> Status:
        """Returns the status. To be called often: it detects an idle group's death, and ends one after its timeout."""
        group = self.group
        if group is not None and self._activity.now.state in RESTING and not group.alive:
            with self._locked() as acquired:
                if acquired:
                    group.check_alive()
        if self._idle_too_long:
            with self._locked() as acquired:
                if acquired and self._idle_too_long:
                    reason = say("ended.idle", seconds=f"{self.idle_seconds:g}")
                    log.info("[CP] the workers have stopped: %s", reason)
                    self._close()
                    self._activity.ended(reason)
        return self._activity.now

    def restart(self, reason: str, comfy: ComfySetup | None) -> bool:
        """Ends the group, also during a run, which fails with `reason`, and starts another like it on another thread,
        also after a failed start. Returns False if there is none to restart and none is starting."""
        group, now = self.group, self._activity.now
        self.history.expect_nobody()
        if group is None:
            if now.state in ("died", "unstarted") and now.placement is not None:
                self.start_ahead(now.placement, comfy, queued=False)
                return True
            return now.state == "starting"

        with self._locked(lambda: group.kill(reason)):
            if group.in_run:  # a callback of that run asks for it
                group.kill(reason)
            elif self.group is group:  # nobody has replaced it meanwhile
                self._close()
        self.start_ahead(group.placement, group.comfy, queued=False)
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
    def _idle_too_long(self) -> bool:
        """Has the group been idle for longer than its limit?"""
        now = self._activity.now
        idle = self.group is not None and now.state not in BUSY
        return idle and 0 < self.idle_seconds < time.monotonic() - max(self._last_used_at, now.began_at)

    @contextmanager
    def _locked(self, meanwhile: Callable[[], bool | None] = lambda: False) -> Iterator[bool]:
        """Holds the group's lock, and yields True; False if another thread has it and `meanwhile` returns False."""
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if meanwhile() is False:
                yield False
                return
        try:
            yield True
        finally:
            self._lock.release()

    def _current(self, placement: Placement, comfy: ComfySetup | None, watch: Callable[[], None]) -> WorkerGroup:
        group = self.live
        if group is not None and (group.placement, group.comfy) != (placement, comfy):
            group = None
        if group is not None and self._activity.now.state not in BUSY:
            try:  # a worker that was killed a moment ago may still count as running
                group.measure(watch)
            except WorkerDied as died:
                log.warning("[CP] %s", died)
        if group is None or not group.alive:
            if placement.nnodes > 1:  # a name that nobody knows is refused before it costs the live workers
                parse_endpoint(placement.rdzv_endpoint)
            self._close()
        if self.group is None:
            machines = f" on each of {placement.nnodes} machines" if placement.nnodes > 1 else ""
            log.info("[CP] starting %d worker(s): %s%s", placement.world_size, ", ".join(placement.devices), machines)
            self.group = WorkerGroup(placement, comfy, watch, self._activity, lambda: self.stall_seconds)
            self.profiles[placement] = self.measured.settled(placement, self.group.profile)
        return self.group

    def _close(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            group.close()
            self._activity.ended()


runtime = Runtime()
atexit.register(runtime.close)
