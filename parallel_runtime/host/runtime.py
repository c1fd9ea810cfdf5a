"""The one worker group of this process: started when first needed, replaced when it is dead or does not fit."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

from ..specs import ComfySetup, Placement
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
            log.info("[CP] starting %d worker(s) on %s", placement.world_size, ", ".join(placement.devices))
            _group = WorkerGroup(placement, comfy, watch)
        return _group


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
