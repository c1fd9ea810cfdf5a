"""
ParallelError
  Refused            the request cannot be honoured; says what was found and the way out (also a ValueError). Whoever
                     refuses, workers too, goes on afterwards
  WorkerLost
    WorkerStartError the group did not come up
    WorkerDied       the group went away, or stopped answering, in the middle of a request
  WorkerFailed       a rank raised; names rank and exception, carries the traceback
  ProtocolError      bytes that are no message or bundle of ours
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ParallelError(Exception):
    """Everything the runtime raises on purpose."""


class Refused(ParallelError, ValueError):
    """Bad input, or what workers cannot do as they are asked to. `fix` are widgets of CP Parallel Config with values
    that would do, where there are such."""

    def __init__(self, sentence: str = "", fix: Mapping[str, Any] | None = None) -> None:
        super().__init__(sentence)
        self.fix = dict(fix or {})


class WorkerLost(ParallelError):
    """`rank` is the worker that it began with, None where it was none, or nobody knows."""

    def __init__(self, sentence: str, rank: int | None = None) -> None:
        super().__init__(sentence)
        self.rank = rank


class WorkerStartError(WorkerLost):
    pass


class WorkerDied(WorkerLost):
    pass


class ProtocolError(ParallelError):
    pass


class WorkerFailed(ParallelError):
    def __init__(self, rank: int, error: str, where: str, traceback: str, machine: str = "") -> None:
        on = f" on {machine}" if machine else ""
        super().__init__(f"worker rank {rank}{on} failed: {error} ({where})")
        self.rank = rank
        self.traceback = traceback
        self.out_of_memory = "out of memory on" in error
