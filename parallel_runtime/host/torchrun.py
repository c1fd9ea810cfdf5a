"""One torchrun on this machine, in a private folder, on a leash; and what it and its workers print."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .. import accelerators
from ..wire.handshake import KEY
from .journal import Journal, rank_of

PACKAGE = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 5.0
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
COMFYUIS_ALLOCATOR = "backend:cudaMallocAsync"
LOG_LINES = 200
OWN_LINE = r"[WEI]\d{4} .*torch/distributed/elastic"
OWN_REPORT = rf"{OWN_LINE}.*failed \(exitcode"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the torchruns of a group meet, and their ranks after them: at `store`, a file on one machine and host:port
    on several, as number `machine` of so many, and by this network `interface`."""

    store: str
    machine: int = 0
    machines: int = 1
    interface: str = "lo"


class Torchrun:
    """`folder` is there from the start, and private; the process once `start` was called."""

    machine = ""  # this one
    agent: subprocess.Popen[bytes]

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal or Journal()
        self.folder = tempfile.mkdtemp(prefix="cp-")
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self._started = self._reporting = False
        self._secrets: tuple[str, ...] = (self.folder,)

    def start(self, workers: int, address: str, token: str, meeting: Meeting, key: str = "") -> None:
        """Start `workers` ranks that will call at `address`, a unix socket, or host:port for who has `key`, and show
        `token`."""
        command = [
            sys.executable, "-m", f"{PACKAGE.name}.worker.agent",
            f"--nproc-per-node={workers}", "--max-restarts=0", "--monitor-interval=0.1", "--log-dir", self.folder,
            f"--nnodes={meeting.machines}", "--rdzv-backend=told", f"--rdzv-endpoint={meeting.store}",
            f"--rdzv-conf=machine={meeting.machine}",
            "-m", f"{PACKAGE.name}.worker", address,
        ]  # fmt: skip
        self._secrets = (token, key, self.folder)
        self.agent = subprocess.Popen(
            command,
            cwd=PACKAGE.parent,
            env=environment(workers, token, self.folder, meeting, key),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started = True
        assert self.agent.stdout is not None
        self._reader = threading.Thread(target=self._relay, args=(self.agent.stdout,), daemon=True)
        self._reader.start()

    def _is_its_own(self, text: str) -> bool:
        """What torchrun says of itself; a traceback and a table of failures are the last of that."""
        self._reporting |= bool(re.match(OWN_REPORT, text))
        return bool(re.match(OWN_LINE, text)) or (self._reporting and rank_of(text) is None)

    def running(self) -> bool:
        return self._started and self.agent.poll() is None

    def failing(self) -> bool:
        """A worker has ended badly, and torchrun is about to end: that takes it a second or two."""
        return any("failed (exitcode: " in line for line in list(self.lines))

    def cause_of_death(self, pid: int) -> str:
        """How torchrun says that this worker ended, as far as it has said so a moment later."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(1.0)
            self._reader.join(0.5)
        return cause_of_death(self.lines, pid, self.agent.returncode)

    def last_words(self) -> list[str]:
        """What was printed last; all of it where the process has ended."""
        if not self.running():
            self._reader.join(GRACE_SECONDS)
        return list(self.lines)

    def kill(self) -> None:
        """End its processes, and wait for none."""
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.agent.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and wait for what prints, which its workers do. Idempotent."""
        if self._started:
            self.kill()
            self.agent.wait()
            assert self.agent.stdin is not None
            self.agent.stdin.close()
            self._reader.join(GRACE_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _relay(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            self.lines.append(text)
            if not self._is_its_own(text):
                self._journal.note(text, hide=self._secrets)
            log.log(logging.INFO if text.startswith("[CP rank") else logging.DEBUG, "%s", text)
        stream.close()


def environment(workers: int, token: str, folder: str, meeting: Meeting, key: str = "") -> dict[str, str]:
    """Of torchrun and its workers. A user's own settings win over ours of GPUs and networks."""
    cores = str(max(1, (os.cpu_count() or 1) // workers))
    ours = {
        # Gloo, NCCL and their like listen on their own; on one machine they need no more than loopback.
        "GLOO_SOCKET_IFNAME": meeting.interface,
        **accelerators.environment(meeting.interface),
        "OMP_NUM_THREADS": cores,
        "TORCHINDUCTOR_COMPILE_THREADS": cores,  # a pool of processes in each worker
    }
    theirs = _with_an_allocator_of_their_own(os.environ)
    private = {"CP_TOKEN": token, "CP_FOLDER": folder, KEY: key}
    return {**ours, **theirs, **private, "PYTHONSAFEPATH": "", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def _with_an_allocator_of_their_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the allocator that ComfyUI's main.py asks for in its own process; what else a user set of it stays."""
    made = dict(environment)
    for name in ALLOCATOR:
        words = made.pop(name, "").split(",")
        if kept := [word for word in words if word and "".join(word.split()) != COMFYUIS_ALLOCATOR]:
            made[name] = ",".join(kept)
    return made


def cause_of_death(lines: Iterable[str], pid: int, torchrun: int | None = None) -> str:
    """From torchrun's report at its end, or from what it logs at once; else from how it ended itself."""
    if found := re.search(rf"exitcode\s*: (-?\d+)\)?( local_rank: \d+)? \(pid: {pid}\)", "\n".join(lines)):
        code = int(found[1])
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    if torchrun is not None and torchrun < 0:
        return f"went away with torchrun, which was killed by {signal.Signals(-torchrun).name}"
    return "went away"


def last_error(lines: Iterable[str]) -> str:
    """The line of the workers' output that looks like the error, ready to append to a sentence."""
    lines = list(lines)
    errors = [line for line in lines if re.match(r"\s*(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)]
    last = errors[0] if errors else (lines[-1] if lines else "")
    return f": {last.strip()}" if last else ""
