"""No process of ours outlives the host. Imports nothing heavy: it is armed before torch is.

Two leashes, because each covers what the other cannot: the kernel kills us with our parent, and the host's end of a
pipe or socket closes when the host is gone, however it went.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL us when our parent dies (Linux); exit at once if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def end_parent(parent: int) -> None:
    """SIGKILL our parent if it still is that process: it may be stopped, and deaf to its own leash."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def die_when(returns: Callable[[], object], last: Callable[[], object] = lambda: None) -> None:
    """Run `returns` on a thread; when it comes back, do `last` and die, whatever else this process was doing."""

    def watch() -> None:
        returns()
        last()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="leash", daemon=True).start()
