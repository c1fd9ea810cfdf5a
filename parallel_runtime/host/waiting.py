"""The answers of every rank to one request: heard as they come in, or the reason why one will not come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from typing import Any

from ..errors import ParallelError, Refused, WorkerDied, WorkerFailed
from ..wire.bundles import read_bundle
from ..wire.messages import Beat, Done, Failed, Step
from .launch import POLL_SECONDS, Processes
from .patience import Patience
from .status import Activity

FAILURE_SECONDS = 0.3
IN_REPLAYS = "They replayed CUDA graphs: if this happens again, set cuda_graphs to off"


class Waiting:
    """The answers to one request, as they come in."""

    def __init__(self, processes: Processes, job: int, patience: Patience, activity: Activity) -> None:
        self.answers: dict[int, tuple[Done, Any]] = {}
        self._processes = processes
        self._channels = processes.channels
        self._job = job
        self._activity = activity
        self.patience = patience

    @property
    def over(self) -> bool:
        return len(self.answers) == len(self._channels)

    @property
    def refused(self) -> tuple[int, str] | None:
        """The rank that refused, and its sentence: some only say that another one did."""
        said = [(rank, done.refused) for rank, (done, _) in sorted(self.answers.items()) if done.refused is not None]
        return max(said, key=lambda refusal: bool(refusal[1]), default=None)

    def agreed(self) -> dict[int, tuple[Done, Any]]:
        """The answers of all ranks, once it is over. Raises Refused where they are one."""
        if self.refused is not None:
            rank, sentence = self.refused
            machine = self._processes.machine_of(rank)
            raise Refused(f"{sentence} (on {machine})" if machine else sentence)
        return self.answers

    def listen(self) -> list[tuple[int, Any, Any, int]]:
        """Wait up to POLL_SECONDS for what the ranks say; the steps that rank 0 reported, oldest first."""
        steps = []
        for rank in self._ready(POLL_SECONDS):
            message, bundle = self._receive(rank)
            value: Any = read_bundle(bundle) if bundle is not None else None
            if getattr(message, "job", self._job) != self._job:
                continue
            self.patience.hear(rank)
            self._activity.heard(rank, message)
            match message:
                case Failed():
                    raise self._root_cause(message)
                case Step(step=step, total=total):
                    x0, x = (value["x0"], value["x"]) if value else (None, None)
                    steps.append((step, x0, x, total))
                case Done(refused=refused):
                    self.answers[rank] = (message, value)
                    if refused is not None:
                        self.patience.refused()
                case Beat(loaded=None, busy="compiling"):
                    self.patience.compiling(rank)
                case Beat(loaded=None):
                    self.patience.sampling(rank)
        self._check_stall()
        return steps

    def _ready(self, timeout: float) -> Iterable[int]:
        ready = wait([channel.fileno() for channel in self._channels], timeout)
        return [rank for rank, channel in enumerate(self._channels) if channel.fileno() in ready]

    def _receive(self, rank: int) -> tuple[Any, int | None]:
        try:
            return self._channels[rank].receive()
        except (EOFError, OSError):
            self._activity.gone(self._processes.named(rank), rank)
            raise self._processes.died(rank) from None

    def _root_cause(self, failed: Failed) -> ParallelError:
        """A rank that lost a peer fails too; if some rank is gone without a word, that is the news."""
        time.sleep(FAILURE_SECONDS)
        for rank in self._ready(0):
            if rank != failed.rank:
                try:
                    _, bundle = self._receive(rank)
                except WorkerDied as died:
                    return died
                if bundle is not None:
                    os.close(bundle)
        machine = self._processes.machine_of(failed.rank)
        return WorkerFailed(failed.rank, failed.error, failed.where, failed.traceback, machine)

    def _check_stall(self) -> None:
        if lost := self.patience.lost([rank for rank in range(len(self._channels)) if rank not in self.answers]):
            if refused := self.refused:
                rank, sentence = refused
                alone = f"worker {self._processes.named(lost[0])} did not refuse, and waits for it"
                raise WorkerFailed(rank, f"Refused: {sentence}", alone, "", self._processes.machine_of(rank))
            replaying = self._activity.replaying
            raise WorkerDied(
                f"worker {self._processes.named(lost[0])} has not been heard of for {lost[1]:.0f} s; "
                f"the next run starts fresh workers{'. ' + IN_REPLAYS if replaying else ''}",
                lost[0],
            )
