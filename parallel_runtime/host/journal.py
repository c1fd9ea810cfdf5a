"""The last lines that the workers printed and this pack logged, by rank: what a user is shown when something failed."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

LINES = 500
LINE_CHARACTERS = 2000
HIDDEN = "***"


@dataclass(frozen=True, kw_only=True)
class Line:
    """`rank` is None where a line does not say which worker it is of; `at` is in seconds of the epoch."""

    at: float
    rank: int | None
    text: str


class Journal(logging.Handler):
    """Fill it as a handler of loggers, or with `note`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[Line] = deque(maxlen=LINES)

    def note(self, text: str, hide: Iterable[str] = ()) -> None:
        """`hide` are secrets that must not be shown, should they ever be printed."""
        for secret in filter(None, hide):
            text = text.replace(secret, HIDDEN)
        self._lines.append(Line(at=time.time(), rank=rank_of(text), text=text[:LINE_CHARACTERS]))

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.endswith(".torchrun"):  # which notes itself, whatever the level
            for line in record.getMessage().splitlines():
                self.note(line)

    def tail(self, lines: int = LINES, rank: int | None = None) -> list[Line]:
        """The last `lines`, oldest first: of one rank, or of all."""
        found = [line for line in list(self._lines) if rank is None or line.rank == rank]
        return found[-lines:] if lines > 0 else []


def rank_of(text: str) -> int | None:
    """Our workers' own log, and torch's tracebacks, begin with the rank."""
    found = re.match(r"\[(?:CP )?(?:rank|default) ?(\d{1,4})\]", text)
    return int(found[1]) if found else None
