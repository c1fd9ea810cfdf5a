"""Start the processes of a group and meet them: one torchrun, one socket a rank, all in a private folder."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ..errors import ProtocolError, WorkerStartError
from ..specs import ComfySetup, Placement
from ..wire.channel import Channel, short_path
from ..wire.messages import PROTOCOL, Failed, Joined, Ready, Welcome
from .cost import Link, coarse

PACKAGE = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
LOG_LINES = 200

log = logging.getLogger(__name__)


class Processes:
    """torchrun and its workers. `ranks` is filled by `meet`, in rank order."""

    def __init__(self, placement: Placement) -> None:
        self.channels: list[Channel] = []
        self._placement = placement
        self._pids: list[int] = []
        self._pidfds: list[int] = []
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._token = secrets.token_hex(16)
        self._folder, self._server = _meeting_place()
        self._address = os.path.join(self._folder, "socket")
        self._server.listen(placement.world_size)
        self._server.settimeout(POLL_SECONDS)
        self._agent = self._launch()
        assert self._agent.stdout is not None
        self._reader = threading.Thread(target=self._relay, args=(self._agent.stdout,), daemon=True)
        self._reader.start()

    def meet(self, comfy: ComfySetup | None, timeout: float, watch: Callable[[], None]) -> Link:
        """Accept every rank and wait until the group has formed. Raises WorkerStartError, with the reason.

        Returns what the ranks measured, the slowest of each.
        """
        deadline = time.monotonic() + timeout
        by_rank: dict[int, Channel] = {}
        pids: dict[int, int] = {}
        while len(by_rank) < self._placement.world_size:
            self._check_start(deadline, len(by_rank))
            watch()
            with contextlib.suppress(TimeoutError):
                sock, _ = self._server.accept()
                sock.settimeout(GRACE_SECONDS)
                if ready := self._admit(channel := Channel(sock)):
                    by_rank[ready.rank], pids[ready.rank] = channel, ready.pid
                    sock.settimeout(None)
        ranks = range(self._placement.world_size)
        self.channels = [by_rank[rank] for rank in ranks]
        self._pids = [pids[rank] for rank in ranks]
        self._pidfds = [os.pidfd_open(pid) for pid in self._pids] if hasattr(os, "pidfd_open") else []
        for rank, channel in enumerate(self.channels):
            store = os.path.join(self._folder, "store")
            channel.send(Welcome(self._placement.devices[rank], store, self._placement.shared, comfy))
        joined = []
        for rank, channel in enumerate(self.channels):
            while not channel.waiting():
                self._check_start(deadline, len(by_rank))
                watch()
                time.sleep(POLL_SECONDS / 5)
            joined.append(self._joined(rank, channel))
        self._server.close()
        os.unlink(self._address)
        return Link(
            bytes_per_second=coarse(min(answer.bytes_per_second for answer in joined)),
            flops_per_second=coarse(min(answer.flops_per_second for answer in joined)),
            free_bytes=tuple(answer.free_bytes for answer in joined),
        )

    def running(self) -> bool:
        """torchrun is there, and so is every rank that we have met."""
        ended = select.select(self._pidfds, [], [], 0)[0] if self._pidfds else []
        return self._agent.poll() is None and not ended

    def cause_of_death(self, rank: int) -> str:
        """How torchrun says that this rank ended, as far as it has said so a moment later."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(1.0)
            self._reader.join(0.5)
        text = "\n".join(self._lines)
        pid = self._pids[rank]
        if found := re.search(rf"exitcode\s*: (-?\d+) \(pid: {pid}\)", text):
            code = int(found[1])
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if (code := self._agent.returncode) is not None and code < 0:
            return f"went away with torchrun, which was killed by {signal.Signals(-code).name}"
        return "went away"

    def close(self, *, gently: bool) -> None:
        """End every process; gently: those that are idle get GRACE_SECONDS to leave by themselves. Idempotent."""
        for channel in self.channels:
            channel.close()
        self._server.close()
        if gently:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(GRACE_SECONDS)
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._pidfds = []
        if self._agent.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._agent.pid, signal.SIGKILL)
        self._agent.wait()
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        self._reader.join(GRACE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self) -> subprocess.Popen[bytes]:
        """torchrun's own rendezvous meets in a file, and so do the ranks: nothing of ours listens on a port.

        A keep-alive would only make that file grow: this torchrun is alone.
        """
        world = self._placement.world_size
        command = [
            sys.executable, "-m", f"{PACKAGE.name}.worker.agent",
            "--nnodes=1", f"--nproc-per-node={world}", "--max-restarts=0", "--monitor-interval=0.1",
            "--log-dir", self._folder,
            "--rdzv-backend=c10d", f"--rdzv-endpoint={self._folder}/rendezvous",
            "--rdzv-conf=store_type=file,keep_alive_interval=86400",
            "-m", f"{PACKAGE.name}.worker", self._address,
        ]  # fmt: skip
        threads = max(1, (os.cpu_count() or 1) // world)
        return subprocess.Popen(
            command,
            cwd=PACKAGE.parent,
            env={
                **LOOPBACK,
                "OMP_NUM_THREADS": str(threads),
                **os.environ,
                "CP_TOKEN": self._token,
                "CP_FOLDER": self._folder,
                **AGENT,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _relay(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            log.log(logging.INFO if text.startswith("[CP rank") else logging.DEBUG, "%s", text)
        stream.close()

    def _admit(self, channel: Channel) -> Ready | None:
        """The rank's greeting, if it is one of ours; a stranger is shown the door."""
        with contextlib.suppress(EOFError, OSError, ProtocolError):
            ready, _ = channel.receive()
            if isinstance(ready, Ready) and secrets.compare_digest(ready.token.encode(), self._token.encode()):
                if ready.protocol != PROTOCOL:
                    raise WorkerStartError("the files of CP Sampler changed while ComfyUI was running; restart ComfyUI")
                return ready
        channel.close()
        return None

    def _joined(self, rank: int, channel: Channel) -> Joined:
        try:
            answer, _ = channel.receive()
        except EOFError:
            raise WorkerStartError(f"rank {rank} {self.cause_of_death(rank)} while starting{self.tail()}") from None
        if isinstance(answer, Failed):
            raise WorkerStartError(f"rank {rank} could not start: {answer.error} ({answer.where})")
        assert isinstance(answer, Joined)
        return answer

    def _check_start(self, deadline: float, ready: int) -> None:
        world = self._placement.world_size
        if not self.running():
            self._reader.join(GRACE_SECONDS)
            raise WorkerStartError(f"the workers ended before they were up{self.tail()}")
        if time.monotonic() > deadline:
            raise WorkerStartError(f"only {ready} of {world} workers came up in time{self.tail()}")

    def tail(self) -> str:
        """The last line of the workers' output that looks like an error, ready to append to a sentence."""
        errors = [line for line in self._lines if re.match(r"\s*(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)]
        last = errors[0] if errors else (self._lines[-1] if self._lines else "")
        return f": {last.strip()}" if last else ""


def _meeting_place() -> tuple[str, socket.socket]:
    """A private folder with a socket in it. Raises WorkerStartError where there is no room for them."""
    folder, server = "", socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        folder = tempfile.mkdtemp(prefix="cp-")
        with short_path(os.path.join(folder, "socket")) as address:
            server.bind(address)
    except OSError as error:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise WorkerStartError(
            f"there is no place for the workers' socket: {error}; set TMPDIR to a folder that can be written"
        ) from None
    return folder, server


# Gloo and NCCL listen on their own; on one host they need no more than loopback.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
AGENT = {
    "PYTHONSAFEPATH": "",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
}
