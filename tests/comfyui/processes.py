"""The processes that a test server started, found in /proc by a mark in their environment, which children inherit
and keep when their parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "CP_TEST_SERVER"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    command: str
    rank: int | None  # torchrun tells it to its workers; its agent has none

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def die_with_parent() -> None:
    """For `preexec_fn`."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def marked_processes(mark: str) -> list[Process]:
    """Alive, the server itself included; zombies are dead."""
    seen = (_look_at(Path(entry.path), f"{MARK}={mark}".encode()) for entry in os.scandir("/proc"))
    return sorted((process for process in seen if process), key=lambda process: process.pid)


def wait_until_none(mark: str, seconds: float) -> list[Process]:
    """Who is still there after so long: nobody, one hopes."""
    deadline = time.monotonic() + seconds
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def named_shared_files(processes: list[Process]) -> set[Path]:
    """Files in /tmp and /dev/shm that these processes hold open or mapped and that have a name on disk."""
    return {path for process in processes for path in _open_files(process.pid) if path.exists()}


def maps(pid: int, name: str) -> bool:
    """Does this process have a file mapped whose path holds `name`? Weights on the CPU are views of their file."""
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it ended
        return False


def _look_at(proc: Path, mark: bytes) -> Process | None:
    if not proc.name.isdigit():
        return None
    try:
        environment = (proc / "environ").read_bytes().split(b"\0")
        if mark not in environment or (proc / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return None
        command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:  # it ended, or is not ours to read
        return None
    ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
    return Process(pid=int(proc.name), command=command, rank=ranks[0] if ranks else None)


def _open_files(pid: int) -> set[Path]:
    try:
        targets = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    mapped = [line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6]
    return {Path(name) for name in (*targets, *mapped) if name.startswith(("/tmp/", "/dev/shm/"))}
