"""How many pytests run side by side: `python -m tests.cores` prints pytest's options for this machine.

A group of workers and its limits of time are meant for two cores and some memory; each pytest gets those.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CORES_EACH = 2
GIB_EACH = 6
LIMIT = Path("/sys/fs/cgroup/cpu.max")
MEMORY = Path("/proc/meminfo")


def side_by_side(cores: int, gib: float) -> int:
    return max(1, min(cores // CORES_EACH, int(gib // GIB_EACH)))


def options(jobs: int) -> list[str]:
    """Files stay whole: what a module's tests share is made once."""
    return ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []


def usable_cores() -> int:
    """What this process may use, a container's limit included."""
    usable = len(os.sched_getaffinity(0))
    limit, _, period = (LIMIT.read_text() if LIMIT.is_file() else "max").partition(" ")
    return usable if limit == "max" else max(1, min(usable, int(limit) // int(period)))


def memory_gib() -> float:
    (line,) = (line for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) / 2**20


if __name__ == "__main__":
    sys.stdout.write(" ".join(options(side_by_side(usable_cores(), memory_gib()))))
