"""
ParallelError
  Refused            the request cannot be honoured; its sentence has the value and the way out (also a ValueError).
                     The process that raises it, a worker too, goes on afterwards
  WorkerLost         the group has ended; its `cause` names the worker that failed first, and how
    WorkerStartError the group did not come up
    WorkerDied       the group exited, or stopped answering, during a request
    WorkerFailed     a rank raised; carries the traceback
  OutOfMemory        raised in a worker whose device has too little memory: the host gets a WorkerFailed
  ProtocolError      received bytes that are not a valid message or bundle
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .sentences import Sentence, say


class ParallelError(Exception):
    """Base of all errors that the runtime raises on purpose. `sentence` is its text; a Sentence can be translated."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return str(self.sentence)


ON_ANOTHER_RANK = "elsewhere"


class Refused(ParallelError, ValueError):
    """The request is invalid, or the workers cannot do it. `code` names a sentence in locales/*/main.json, `values`
    fill its placeholders with plain JSON or other Sentences (`say`). `widget` is the one of CP Parallel Config to
    change, if any; `fix` maps its widgets to values that would work. Without a code, another rank has refused with the
    reason."""

    def __init__(
        self,
        code: str = ON_ANOTHER_RANK,
        /,
        widget: str | None = None,
        fix: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(say(code, **values))
        self.code, self.values, self.widget, self.fix = code, values, widget, dict(fix or {})


@dataclass(frozen=True, kw_only=True)
class Cause:
    """How a worker ended. It was killed by `signal`, exited with `exit_code`, lost its torchrun to `signal`, vanished
    for an unknown reason ("gone"), was silent for too long, raised an exception, or ran out of memory."""

    kind: Literal["killed", "exited", "torchrun", "gone", "silent", "raised", "out_of_memory"]
    rank: int
    signal: str = ""  # its name, such as SIGKILL
    exit_code: int | None = None

    def sentence(self, worker: str) -> Sentence:
        """Describes a cause that is known from outside the worker. `worker` is its name for the user."""
        match self.kind:
            case "killed":
                return say("died.killed", worker=worker, signal=self.signal)
            case "exited":
                return say("died.exited", worker=worker, code=self.exit_code)
            case "torchrun":
                return say("died.torchrun", worker=worker, signal=self.signal)
        return say("died.gone", worker=worker)


class WorkerLost(ParallelError):
    """The group has ended. `cause` is that of the worker that failed first; None if no worker failed or it is
    unknown."""

    def __init__(self, sentence: str, cause: Cause | None = None) -> None:
        super().__init__(sentence)
        self.cause = cause


class WorkerStartError(WorkerLost):
    pass


class WorkerDied(WorkerLost):
    pass


class WorkerFailed(WorkerLost):
    cause: Cause

    def __init__(self, sentence: str, cause: Cause, traceback: str) -> None:
        super().__init__(sentence, cause)
        self.traceback = traceback


class OutOfMemory(ParallelError):
    """Raised in a worker: its device has too little memory."""


class ProtocolError(ParallelError):
    pass
