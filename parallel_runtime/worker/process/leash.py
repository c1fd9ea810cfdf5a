"""Ends our processes when the host ends. Imports nothing heavy, since it runs before torch is imported.

There are two ways, because each covers what the other cannot: the kernel kills us with our parent, and the host's end
of a pipe or socket closes when the host ends for any reason.
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
    """Has the kernel SIGKILL us when our parent dies (Linux); exits at once if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def end_parent(parent: int) -> None:
    """Sends SIGKILL to our parent if it still is that process: a stopped one would not end by itself."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def die_when(wait: Callable[[], object], clean_up: Callable[[], object] = lambda: None) -> None:
    """Calls `wait` on a thread; when it returns, calls `clean_up` and kills this process, whatever it is doing."""

    def watch() -> None:
        wait()
        clean_up()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="leash", daemon=True).start()
