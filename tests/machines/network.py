"""Two machines on one: network namespaces, each with an address of its own, and a cable between them."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel_runtime.specs import Parallelism, Placement

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
TOKEN = "a token that both machines have"
PORT = 29500
ULYSSES = Parallelism(ulysses_degree=2)
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def on_two_machines(workers: int = 1) -> Placement:
    """So many CPU workers on each."""
    return Placement(devices=("cpu",) * workers, nnodes=2, rdzv_endpoint=f"{FIRST}:{PORT}")


def why_there_is_none() -> str:
    """What is missing for namespaces; "" where they work."""
    if not sys.platform.startswith("linux") or not shutil.which("ip"):
        return "NO NETWORK NAMESPACES: they need Linux with iproute2"
    name = f"cp-try-{os.getpid()}"
    if _ip("netns", "add", name, check=False):
        return "NO NETWORK NAMESPACES: this user may not make them; run as root"
    _ip("netns", "del", name)
    return ""


@dataclass(frozen=True)
class Network:
    """Namespace names; the cable ends in an interface of the same name in each."""

    first: str
    second: str

    def cable(self, state: str) -> None:
        """ "up" or "down", at the end of the other machine."""
        _ip("-n", self.second, "link", "set", "cable", state)

    @staticmethod
    def listening(pid: int) -> list[str]:
        """The addresses that anything listens on in the namespace of this process, as /proc/net writes them."""
        rows = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        ]
        return [row[1] for row in rows if row[3] == "0A"]


@contextmanager
def network() -> Iterator[Network]:
    """While it lasts, this thread and what it starts are in the first namespace."""
    number = next(_numbers)
    names = [f"cp-{os.getpid()}-{number}-{side}" for side in ("here", "there")]
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        _enter(os.open(f"/run/netns/{names[0]}", os.O_RDONLY | os.O_CLOEXEC))
        yield Network(*names)
    finally:
        _enter(before)
        for name in names:
            _ip("netns", "del", name, check=False)


def _enter(namespace: int) -> None:
    try:
        if _libc.setns(namespace, 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)


def _ip(*arguments: str, check: bool = True) -> int:
    return subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL).returncode
