"""The join command on the other machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..comfyui.processes import MARK, Process, die_with_parent, marked_processes
from .network import FIRST, PORT, ROOT, TOKEN


class Guest:
    """Its processes are found by a mark in their environment."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, log: Path) -> None:
        self.process = process
        self._mark = mark
        self._log = log

    def output(self) -> str:
        return self._log.read_text()

    def wait_until_it_says(self, words: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.output():
            assert time.monotonic() < deadline, f"it said {self.output()!r}"
            assert self.process.poll() is None, self.output()
            time.sleep(0.05)

    def workers(self) -> dict[int, Process]:
        return {process.rank: process for process in marked_processes(self._mark) if process.rank is not None}

    def started(self) -> list[Process]:
        """All that the command has started and that is still there."""
        return [process for process in marked_processes(self._mark) if process.pid != self.process.pid]


@contextmanager
def joining(
    folder: Path,
    *arguments: str,
    namespace: str = "",
    wrapper: tuple[str, ...] = (),
    token: str = TOKEN,
    package: Path = ROOT,
    endpoint: str = f"{FIRST}:{PORT}",
    python: Path | str = sys.executable,
) -> Iterator[Guest]:
    """The command while it runs, in `namespace`, with the pack that lies in `package` and with `python`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(token)
    mark = os.urandom(8).hex()
    inside = ("ip", "netns", "exec", namespace) if namespace else ()
    command = [str(python), "-m", "parallel_runtime", "join", endpoint, "--token-file", str(folder / "token")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*inside, *wrapper, *command, *arguments],
            cwd=package,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    guest = Guest(process, mark, folder / "log")
    try:
        yield guest
    finally:
        process.terminate()
        process.wait()
        deadline = time.monotonic() + 3
        while guest.started() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not guest.started(), "outlived the join command"
