"""The one worker group of this process: started when first needed, replaced when it is dead or does not fit, ended
when nobody has used it for long enough."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import ParallelError
from ..specs import ComfySetup, Placement
from ..wire.readings import Race, Readings
from .cost import Link
from .group import WorkerGroup
from .launch import POLL_SECONDS
from .limits import IDLE_SECONDS
from .status import BUSY, RESTING, Activity, Status

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0

_activity = Activity()
_group: WorkerGroup | None = None
_lock = threading.RLock()  # who holds it may use the group, start or end it
_closing = threading.Event()
_idle: threading.Timer | None = None


@contextmanager
def borrowed_group(
    placement: Placement, comfy: ComfySetup | None, watch: Callable[[], None] = lambda: None
) -> Iterator[WorkerGroup]:
    """The live group for `placement`, which nobody else uses or ends meanwhile.

    `watch` is called while we wait for it; what it raises ends the waiting. Raises WorkerStartError.
    """
    while not _lock.acquire(timeout=POLL_SECONDS):
        watch()
    try:
        _stop_clock()
        yield _current(placement, comfy, watch)
    finally:
        _start_clock()
        _lock.release()


def start_ahead(placement: Placement, comfy: ComfySetup | None) -> None:
    """Start the group on a thread of its own, if none is alive. Whoever borrows it hears what goes wrong."""
    threading.Thread(target=_start_ahead, args=(placement, comfy), name="start workers", daemon=True).start()


def measured_link(placement: Placement) -> Link | None:
    """What the live group measured, if it is the one for `placement`."""
    group = _group
    return group.link if group is not None and group.placement == placement else None


def kernel_races(placement: Placement) -> tuple[Race, ...]:
    """What the live group's workers have found out about kernels, if it is the one for `placement`."""
    readings = last_readings(placement)
    return readings[0].races if readings else ()


def last_readings(placement: Placement) -> tuple[Readings, ...]:
    """What each rank of the live group has said of itself last, if it is the group for `placement`."""
    ranks = _activity.now.ranks if measured_link(placement) is not None else ()
    told = tuple(rank.readings for rank in ranks if rank.readings is not None)
    return told if len(told) == len(ranks) else ()


def measure_at_rest(placement: Placement) -> None:
    """Have the live group say anew how much memory there is, if it is the one for `placement` and not at work."""
    with resting_group() as group, contextlib.suppress(ParallelError):
        if group is not None and group.placement == placement and _activity.now.state not in BUSY:
            group.measure()


def live_placement() -> Placement | None:
    """Where the live group is, if there is one."""
    group = _group
    return group.placement if group is not None and group.alive else None


def status() -> Status:
    """What the group is doing. Notices that an idle one has died: ask a few times a second."""
    _activity.rest()
    group = _group
    if group is not None and _activity.now.state in RESTING and not group.alive and _lock.acquire(blocking=False):
        try:
            group.look()
        finally:
            _lock.release()
    return _activity.now


@contextmanager
def resting_group() -> Iterator[WorkerGroup | None]:
    """The live group, which nobody else uses or ends meanwhile; None where there is none, or it is at work."""
    if not _lock.acquire(blocking=False):
        yield None
        return
    try:
        yield _group if _group is not None and _group.alive else None
    finally:
        _lock.release()


@contextmanager
def undisturbed(group: WorkerGroup) -> Iterator[WorkerGroup | None]:
    """`group` once nobody else uses or ends it; None where it has ended, also while we wait for that."""
    while not _lock.acquire(timeout=POLL_SECONDS):
        if _group is not group:  # who has the lock starts another one, which may take minutes
            yield None
            return
    try:
        yield group if _group is group and group.alive else None
    finally:
        _lock.release()


def restart_group(reason: str, comfy: ComfySetup | None) -> bool:
    """End the group, also under a run, which fails with `reason`; another like it starts on a thread of its own, also
    where one did not come up. False where there is none to restart.
    """
    group, now = _group, _activity.now
    if group is None:
        if now.state == "died" and now.placement is not None:
            start_ahead(now.placement, comfy)
            return True
        return False
    if not _lock.acquire(timeout=CLOSE_SECONDS):
        group.kill(reason)
        _lock.acquire()
    try:
        if _group is group:  # nobody has replaced it meanwhile
            _stop_clock()
            _close(gently=False)
    finally:
        _lock.release()
    start_ahead(group.placement, group.comfy)
    return True


def restart_clock() -> None:
    """The idle limit is another one now."""
    if _lock.acquire(blocking=False):
        try:
            _stop_clock()
            _start_clock()
        finally:
            _lock.release()


@atexit.register
def close_group() -> None:
    """End the group, if there is one; a run that uses it fails."""
    _closing.set()
    free = _lock.acquire(timeout=CLOSE_SECONDS)
    _stop_clock()
    _close(gently=free)
    _closing.clear()
    if free:
        _lock.release()


def _current(placement: Placement, comfy: ComfySetup | None, watch: Callable[[], None]) -> WorkerGroup:
    global _group
    if _group and not (_group.alive and _group.placement == placement and _group.comfy == comfy):
        _close()
    if _group is None:
        machines = f" on each of {placement.nnodes} machines" if placement.nnodes > 1 else ""
        log.info("[CP] starting %d worker(s): %s%s", placement.world_size, ", ".join(placement.devices), machines)
        _group = WorkerGroup(placement, comfy, watch, _activity)
    return _group


def _start_ahead(placement: Placement, comfy: ComfySetup | None) -> None:
    if not _lock.acquire(blocking=False):
        return
    try:
        if _group is None or not _group.alive:
            _current(placement, comfy, _unless_closing)
            _start_clock()
    except ParallelError as error:
        log.debug("[CP] no workers started ahead: %s", error)
    finally:
        _lock.release()


def _unless_closing() -> None:
    if _closing.is_set():
        raise ParallelError("ComfyUI is closing")


def _start_clock() -> None:
    global _idle
    if (seconds := float(IDLE_SECONDS)) and _group is not None:
        _idle = threading.Timer(seconds, _end_idle)
        _idle.daemon = True
        _idle.start()


def _stop_clock() -> None:
    global _idle
    if _idle is not None:
        _idle.cancel()
        _idle = None


def _end_idle() -> None:
    """Unless somebody has borrowed the group meanwhile; who only lets its models go is waited for."""
    with _lock:
        if threading.current_thread() is _idle:
            reason = f"ended after {float(IDLE_SECONDS):g} s without a run"
            log.info("[CP] the workers are %s", reason)
            _close()
            _activity.ended(reason)


def _close(*, gently: bool = True) -> None:
    global _group
    if _group is not None:
        group, _group = _group, None
        group.close(gently=gently)
        _activity.ended()
