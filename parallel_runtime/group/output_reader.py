"""Reads a process' output line by line on a thread; each worker writes to a FIFO."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import IO


class OutputReader:
    """Reads lines from a stream. `last_line` is the last non-empty one. `take` is called with every line."""

    def __init__(self, stream: IO[bytes], take: Callable[[str], None], writer: int | None = None) -> None:
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
        writer = os.open(fifo, os.O_RDWR)
        return cls(open(fifo, "rb"), take, writer)

    def end(self, seconds: float) -> None:
        """Waits so long for the remaining output of a process that has ended. Idempotent."""
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
        self._thread.join(seconds)

    def _read(self) -> None:
        with self._stream as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self.last_line = text or self.last_line
                self._take(text)
