"""Keeps the last lines that workers printed and this pack logged, by rank, to show them after a failure."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

LINES = 500
LINE_CHARACTERS = 2000
HIDDEN = "***"


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
        if not record.name.endswith(".torchrun"):  # torchrun.py adds its lines by `note`, whatever the level
            for line in record.getMessage().splitlines():
                self.note(line)

    def tail(self, lines: int = LINES, rank: int | None = None) -> list[Line]:
        """Returns the last `lines`, oldest first, of one rank or of all."""
        chosen = [line for line in list(self._lines) if rank is None or line.rank == rank]
        return chosen[-lines:] if lines > 0 else []
