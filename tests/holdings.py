"""What processes hold: descriptors, threads and memory, read from /proc. For tests that demand it stays flat."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """`memory_mb` is private memory and shared memory files, without mapped files of the disk."""

    descriptors: int
    threads: int
    memory_mb: float


def holdings(pid: int) -> Holdings:
    _, resident, mapped, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return Holdings(
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        memory_mb=(int(resident) - int(mapped)) * PAGE_MB + int(status["RssShmem"].split()[0]) / 1024,
    )


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))
