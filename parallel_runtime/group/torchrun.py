"""One torchrun on this machine, with a private folder; it ends with this process. Reads its and the workers' output,
and keeps the last lines that workers printed and this pack logged, by rank, to show them after a failure."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from io import FileIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from .. import accelerators
from ..accelerators import Transport
from ..errors import Cause
from ..wire.channel import KEY
from ..wire.messages import Ended, decode

PACKAGE = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 5.0
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
COMFYUIS_ALLOCATOR = "backend:cudaMallocAsync"
DEFAULT_TRANSPORT = Transport()
WORKER_LOG_PREFIX = "[CP rank"  # how what a worker logs begins, see worker/serve.py
LINES = 500  # that a Journal keeps
LINE_CHARACTERS = 2000
HIDDEN = "***"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the log. `rank` is None for ComfyUI's process; `at` is in seconds of the epoch."""

    at: float
    rank: int | None
    text: str


class Journal(logging.Handler):
    """A logging handler that keeps the last lines; `note` adds lines of workers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[Line] = deque(maxlen=LINES)

    def note(self, text: str, rank: int | None = None, hide: Iterable[str] = ()) -> None:
        """Adds a line, with the secrets in `hide` masked."""
        for secret in filter(None, hide):
            text = text.replace(secret, HIDDEN)
        self._lines.append(Line(at=time.time(), rank=rank, text=text[:LINE_CHARACTERS]))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != log.name:  # a Torchrun adds its lines by `note`, whatever the level
            for line in record.getMessage().splitlines():
                self.note(line)

    def tail(self, lines: int = LINES, rank: int | None = None) -> list[Line]:
        """Returns the last `lines`, oldest first, of one rank or of all."""
        chosen = [line for line in list(self._lines) if rank is None or line.rank == rank]
        return chosen[-lines:] if lines > 0 else []


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place where the torchruns of a group and their ranks connect: `store` is a file on one machine, host:port on
    several. This is machine number `machine` of `machines`, on the network interface `interface`."""

    store: str
    machine: int = 0
    machines: int = 1
    interface: str = "lo"


class Torchrun:
    """The torchrun process of `ranks`, after `start`, with a private `folder`. Raises OSError on a full disk."""

    machine = ""  # this one
    agent: subprocess.Popen[bytes]

    def __init__(self, ranks: range, journal: Journal | None = None) -> None:
        self._journal = journal or Journal()
        self.folder = tempfile.mkdtemp(prefix="cp-")
        self._ranks = ranks
        self._printed: dict[int | None, OutputReader] = {}  # by rank; None: torchrun
        self._report: Connection | None = None
        self._closing = threading.Lock()
        self._ended: Ended | None = None
        self._secrets: tuple[str, ...] = (self.folder,)
        try:
            for rank in ranks:
                fifo = os.path.join(self.folder, f"output-{rank}")  # worker/__main__.py opens it
                self._printed[rank] = OutputReader.from_fifo(fifo, partial(self._note, rank))
        except OSError:
            self.close()
            raise

    def start(
        self, address: str, token: str, meeting: Rendezvous, key: str = "", transport: Transport = DEFAULT_TRANSPORT
    ) -> None:
        """Starts the ranks, which connect to `address`, a unix socket, or host:port with `key`, and send `token`."""
        self._secrets = (token, key, self.folder)
        report, agent_end = Pipe(duplex=False)
        workers = len(self._ranks)
        command = [
            sys.executable, "-m", f"{PACKAGE.name}.worker.agent", str(agent_end.fileno()),
            f"--nproc-per-node={workers}", "--max-restarts=0", "--monitor-interval=0.1", "--log-dir", self.folder,
            f"--nnodes={meeting.machines}", "--rdzv-backend=cp-store", f"--rdzv-endpoint={meeting.store}",
            f"--rdzv-conf=machine={meeting.machine}",
            "-m", f"{PACKAGE.name}.worker", address,
        ]  # fmt: skip
        with agent_end:
            # In a session of its own: `kill` ends all of it, and Ctrl-C in ComfyUI's terminal nothing of it.
            self.agent = subprocess.Popen(
                command, cwd=PACKAGE.parent, env=environment(workers, token, self.folder, meeting, key, transport),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=[agent_end.fileno()], start_new_session=True,
            )  # fmt: skip
        self._report = report
        assert self.agent.stdout is not None
        self._printed[None] = OutputReader(self.agent.stdout, partial(log.debug, "%s"))

    def running(self) -> bool:
        return self._report is not None and self.agent.poll() is None

    def ended(self, seconds: float = 0.0) -> Ended | None:
        """Returns how the workers ended, which torchrun reports a second or two before it exits; None if it reports
        nothing within this many seconds. A killed torchrun reports an empty Ended."""
        if self._ended is None and self._report is not None:
            try:
                if self._report.poll(seconds):
                    self._ended = decode(self._report.recv_bytes())
            except (EOFError, OSError):  # OSError: another thread has closed it
                self._ended = Ended()
        return self._ended

    def cause_of_death(self, rank: int) -> Cause:
        """Returns how this rank ended, as far as torchrun reports it: within a second, and later on a busy machine."""
        ended = self.ended(GRACE_SECONDS) or Ended()
        self._printed[rank].end(0.5)
        if cause := next((cause for cause in ended.causes if cause.rank == rank), None):
            return cause
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (code := self.agent.wait(0.5)) < 0:
                return Cause(kind="torchrun", rank=rank, signal=signal.Signals(-code).name)
        return Cause(kind="gone", rank=rank)

    def last_line(self) -> str:
        """Returns the last line of the rank that failed first; else that of any rank, or of torchrun."""
        first = [cause.rank for cause in (self._ended or Ended()).causes]
        lines = (self._printed[rank].last_line for rank in (*first, *self._ranks, None) if rank in self._printed)
        return next(filter(None, lines), "")

    def kill(self) -> None:
        """Kills its processes, without waiting."""
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.agent.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends torchrun, and waits for the workers' last output. Idempotent, also when two threads call it at once."""
        with self._closing:
            if self._report is not None:
                self.kill()
                self.agent.wait()
                assert self.agent.stdin is not None
                self.agent.stdin.close()
                self._report.close()
            for printed in self._printed.values():
                printed.end(GRACE_SECONDS)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _note(self, rank: int, text: str) -> None:
        self._journal.note(text, rank, hide=self._secrets)
        log.log(logging.INFO if text.startswith(WORKER_LOG_PREFIX) else logging.DEBUG, "%s", text)


class OutputReader:
    """Reads lines from a stream. `last_line` is the last non-empty one. `take` is called with every line."""

    def __init__(self, stream: IO[bytes], take: Callable[[str], None], writer: FileIO | None = None) -> None:
        self.last_line = ""
        self._stream = stream
        self._take = take
        self._writer = writer
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @classmethod
    def from_fifo(cls, fifo: str, take: Callable[[str], None]) -> OutputReader:
        """Makes a FIFO and reads it. A writer is kept open here, so that opening it never blocks."""
        os.mkfifo(fifo, 0o600)
        writer = FileIO(fifo, "r+")
        try:
            return cls(open(fifo, "rb"), take, writer)
        except OSError:  # such as too many open files
            writer.close()
            raise

    def end(self, seconds: float) -> None:
        """Waits so long for the remaining output of a process that has ended. Idempotent."""
        if self._writer is not None:
            self._writer.close()
        self._thread.join(seconds)

    def _read(self) -> None:
        with self._stream as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self.last_line = text or self.last_line
                self._take(text)


def environment(
    workers: int, token: str, folder: str, meeting: Rendezvous, key: str = "", transport: Transport = DEFAULT_TRANSPORT
) -> dict[str, str]:
    """Returns the environment of torchrun and its workers. A user's settings of GPUs and networks override ours."""
    cores = str(max(1, (os.cpu_count() or 1) // workers))
    defaults = {
        # Gloo, NCCL and their like listen on their own; on one machine they need no more than loopback.
        "GLOO_SOCKET_IFNAME": meeting.interface,
        **accelerators.environment(meeting.interface),
        **transport.environment,
        "OMP_NUM_THREADS": cores,
        "TORCHINDUCTOR_COMPILE_THREADS": cores,  # a pool of processes in each worker
    }
    inherited = dict(os.environ)
    # Without the allocator that ComfyUI's main.py sets for its own process; the user's other options stay.
    for name in ALLOCATOR:
        words = inherited.pop(name, "").split(",")
        if options := [word for word in words if word and "".join(word.split()) != COMFYUIS_ALLOCATOR]:
            inherited[name] = ",".join(options)
    private = {"CP_TOKEN": token, "CP_FOLDER": folder, KEY: key}
    return {**defaults, **inherited, **private, "PYTHONSAFEPATH": "", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
