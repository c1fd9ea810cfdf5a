"""The answers of every rank to one request: heard as they come in, or the reason why one will not come, which may be
that it has been silent for too long."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from typing import Any, Literal

from ..errors import ParallelError, Refused, WorkerDied, WorkerFailed
from ..wire.bundles import read_bundle
from ..wire.messages import Beat, Done, Failed, Step
from .activity import Activity
from .launch import POLL_SECONDS, Processes

FAILURE_SECONDS = 0.3
IN_REPLAYS = "They replayed CUDA graphs: if this happens again, set cuda_graphs to off"

Doing = Literal["", "loading", "sampling", "compiling"]  # "" until a rank says a word


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
                case Beat(loaded=None, busy=busy):
                    self.patience.does(rank, "compiling" if busy == "compiling" else "sampling")
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


class Patience:
    """How long the ranks of one request may be silent. Knows neither messages nor processes.

    Limits in seconds: `load` while a rank loads or compiles, `stall` before and after.

    Ahead of a cancelled rank is no more than the rest of one step: how long one takes, known after the first, and
    `cancel` on top. Where a rank has refused, those that sample are at the same place, and have `cancel` to say so;
    who does not will wait for that rank for ever.
    """

    def __init__(self, ranks: int, *, load: float, stall: float, cancel: float) -> None:
        self.cancelled = False
        self._load = load
        self._stall = stall
        self._cancel = cancel
        self._heard = [time.monotonic()] * ranks
        self._doing: list[Doing] = [""] * ranks
        self._longest_step = 0.0
        self._refused: float | None = None  # when

    def hear(self, rank: int) -> None:
        now = time.monotonic()
        if self._doing[rank] == "sampling":
            self._longest_step = max(self._longest_step, now - self._heard[rank])
        self._doing[rank] = self._doing[rank] or "loading"
        self._heard[rank] = now

    def does(self, rank: int, doing: Doing) -> None:
        """This rank has loaded. One that compiles hears no cancel until torch.compile is done."""
        self._doing[rank] = doing

    def refused(self) -> None:
        """A rank has."""
        self._refused = self._refused or time.monotonic()

    def lost(self, waited_for: Collection[int]) -> tuple[int, float] | None:
        """The rank that the others wait for, and its silence, if any of `waited_for` has been silent for too long."""
        now = time.monotonic()
        if all(now - self._heard[rank] <= self._limit(rank) for rank in waited_for):
            return None
        stuck = min(waited_for, key=lambda rank: self._heard[rank])
        return stuck, now - self._heard[stuck]

    def _limit(self, rank: int) -> float:
        stall = min(self._stall, self._load)
        match self._doing[rank]:
            case "compiling":
                return stall if self.cancelled else self._load
            case "loading":
                return min(self._cancel, self._load) if self.cancelled else self._load
        if self._refused is not None:
            return min(self._cancel, stall) + max(0.0, self._refused - self._heard[rank])
        return min(self._cancel + self._longest_step, stall) if self.cancelled and self._longest_step else stall
