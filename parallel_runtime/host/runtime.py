"""The one worker group of this process: started when first needed, replaced when it is dead or does not fit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable

from ..errors import ParallelError
from ..specs import ComfySetup, Placement
from .cost import Link
from .group import WorkerGroup

log = logging.getLogger(__name__)

_group: WorkerGroup | None = None
_lock = threading.Lock()


def current_group(
    placement: Placement, comfy: ComfySetup | None, watch: Callable[[], None] = lambda: None
) -> WorkerGroup:
    """The live group for `placement`. `watch` is called while it starts; what it raises ends the start."""
    global _group
    with _lock:
        if _group and not (_group.alive and _group.placement == placement and _group.comfy == comfy):
            _close()
        if _group is None:
            machines = f" on each of {placement.nnodes} machines" if placement.nnodes > 1 else ""
            log.info("[CP] starting %d worker(s): %s%s", placement.world_size, ", ".join(placement.devices), machines)
            _group = WorkerGroup(placement, comfy, watch)
        return _group


def measured_link(placement: Placement) -> Link | None:
    """What the live group measured, if it is the one for `placement`."""
    group = _group
    return group.link if group is not None and group.placement == placement else None


def unload_group() -> None:
    """Have the live group drop its models, if there is one; a group that cannot is ended."""
    group = _group
    if group is not None and group.alive:
        with contextlib.suppress(ParallelError):
            group.unload()


@atexit.register
def close_group() -> None:
    """End the group, if there is one."""
    with _lock:
        _close()


def _close() -> None:
    global _group
    if _group is not None:
        group, _group = _group, None
        group.close()
