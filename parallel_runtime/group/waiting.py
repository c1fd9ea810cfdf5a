"""Collects every rank's answer to one request, or raises why one will not come, as where a rank is silent too long."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from typing import Any, Literal

from ..errors import ON_ANOTHER_RANK, Cause, WorkerDied, WorkerFailed, WorkerLost, say
from ..wire.bundles import read_bundle
from ..wire.messages import Done, Failed, Heartbeat, Refusal, Step
from .activity import Activity
from .launch import POLL_SECONDS, Processes

PEER_FAILURE_SECONDS = 0.3
ALIVE_SECONDS = 1.5  # a rank that samples says in each second that it is alive

Work = Literal["", "loading", "sampling", "compiling"]  # "" before a rank's first message


class Waiting:
    """The answers to one request, as they come in."""

    def __init__(self, processes: Processes, job: int, limits: SilenceLimits, activity: Activity) -> None:
        self.answers: dict[int, tuple[Done, Any]] = {}
        self._processes = processes
        self._channels = processes.channels
        self._job = job
        self._activity = activity
        self.limits = limits

    @property
    def all_answered(self) -> bool:
        return len(self.answers) == len(self._channels)

    @property
    def refused(self) -> tuple[int, Refusal] | None:
        """The rank that refused, with its reason: other ranks only report that another one did."""
        refusals = [(rank, done.refused) for rank, (done, _) in sorted(self.answers.items()) if done.refused]
        return max(refusals, key=lambda refusal: refusal[1].code != ON_ANOTHER_RANK, default=None)

    def agreed(self) -> dict[int, tuple[Done, Any]]:
        """Returns the answers of all ranks, once `all_answered`. Raises Refused if a rank refused."""
        if self.refused is not None:
            rank, refusal = self.refused
            raise refusal.raised(self._processes.machine_of(rank))
        return self.answers

    def listen(self) -> list[tuple[int, Any, Any, int]]:
        """Waits up to POLL_SECONDS for messages, and returns the steps that rank 0 reported, oldest first."""
        steps = []
        for rank in self._ready(POLL_SECONDS):
            message, bundle = self._receive(rank)
            value: Any = read_bundle(bundle) if bundle is not None else None
            if getattr(message, "job", self._job) != self._job:
                continue
            self.limits.receive(rank, message)
            self._activity.receive(rank, message)
            match message:
                case Failed():
                    raise self._root_cause(message)
                case Step(step=step, total=total):
                    x0, x = (value["x0"], value["x"]) if value else (None, None)
                    steps.append((step, x0, x, total))
                case Done():
                    self.answers[rank] = (message, value)
        self._check_stall()
        return steps

    def _ready(self, timeout: float) -> Iterable[int]:
        sockets = [channel.fileno() for channel in self._channels]
        if -1 in sockets:
            raise WorkerDied(say("died.ended"))
        ready = wait(sockets, timeout)
        return [rank for rank, socket in enumerate(sockets) if socket in ready]

    def _receive(self, rank: int) -> tuple[Any, int | None]:
        try:
            return self._channels[rank].receive()
        except (EOFError, OSError):
            self._activity.rank_gone(self._processes.worker_name(rank), rank)
            raise self._processes.died(rank) from None

    def _root_cause(self, failed: Failed) -> WorkerLost:
        """Returns the first cause of a failure: a rank that has died, if any, as one that loses a peer fails too."""
        # The end of the rank that died first may be seen a moment later than the failure of its peer.
        time.sleep(PEER_FAILURE_SECONDS)
        for rank in self._ready(0):
            if rank != failed.cause.rank:
                try:
                    _, bundle = self._receive(rank)
                except WorkerDied as died:
                    return died
                if bundle is not None:
                    os.close(bundle)
        worker = self._processes.worker_name(failed.cause.rank)
        return WorkerFailed(say("died.failed", worker=worker, reason=failed.sentence), failed.cause, failed.traceback)

    def _check_stall(self) -> None:
        awaited = [rank for rank in range(len(self._channels)) if rank not in self.answers]
        if lost := self.limits.timed_out_rank(awaited):
            silent, seconds = lost
            if refused := self.refused:
                rank, refusal = refused
                alone = say("died.alone", worker=self._processes.worker_name(silent))
                reason = say("died.error", error=say("died.refused", reason=refusal.raised().sentence), where=alone)
                failed = say("died.failed", worker=self._processes.worker_name(rank), reason=reason)
                raise WorkerFailed(failed, Cause(kind="raised", rank=rank), "")
            died = say("died.silent", worker=self._processes.worker_name(silent), seconds=f"{seconds:.0f}")
            if any(rank.readings and rank.readings.graphs.replays for rank in self._activity.now.ranks):
                died = say("reason.why", reason=died, why=say("died.replaying"))
            raise WorkerDied(died, Cause(kind="silent", rank=silent))


class SilenceLimits:
    """How long the ranks of one request may go without getting on: a message of theirs, or a block that their device
    has computed. Ranks that sample wait for each other, so they are lost only where none of them gets on.

    Limits in seconds: `load` while a rank loads or compiles, `stall` before and after.

    A cancelled rank has at most the remainder of one step, plus `cancel`: of the longest step so far, known after the
    first or from earlier requests (`longest_step`). After a refusal the ranks that sample are at the same place, and
    have `cancel` seconds to refuse too; otherwise they wait in a collective forever."""

    def __init__(self, ranks: int, *, load: float, stall: float, cancel: float, longest_step: float = 0.0) -> None:
        self.cancelled = False
        self._load = load
        self._stall = stall
        self._cancel = cancel
        self._last_message = [time.monotonic()] * ranks
        self._last_advance = [*self._last_message]
        self._work: list[Work] = [""] * ranks
        self._longest_step = longest_step
        self._refused: float | None = None  # when the first rank did

    def receive(self, rank: int, message: Any) -> None:
        """Takes a message of a rank. One that compiles receives no cancel until torch.compile is done."""
        now = time.monotonic()
        self._last_message[rank] = now
        if getattr(message, "advanced", True):
            if self._work[rank] == "sampling":
                self._longest_step = max(self._longest_step, now - self._last_advance[rank])
            self._last_advance[rank] = now
        match message:
            case Heartbeat(loaded=None, busy=busy):
                self._work[rank] = "compiling" if busy == "compiling" else "sampling"
            case Done(refused=Refusal()):
                self._refused = self._refused or now
            case _:
                self._work[rank] = self._work[rank] or "loading"

    def timed_out_rank(self, waited_for: Collection[int]) -> tuple[int, float] | None:
        """Returns the rank that holds up the others, and the seconds since it got on, if any of `waited_for` has not
        for too long: a process that is silent altogether, if there is one."""
        now = time.monotonic()
        if all(now - self._got_on(rank) <= self._limit(rank) for rank in waited_for):
            return None
        alive = [now - last < ALIVE_SECONDS for last in self._last_message]
        stuck = min(waited_for, key=lambda rank: (alive[rank], self._last_advance[rank]))
        return stuck, now - self._last_advance[stuck]

    def _got_on(self, rank: int) -> float:
        """Returns when this rank, or a rank that it may be waiting for, got on."""
        if self._work[rank] != "sampling" or self._refused is not None:
            return self._last_advance[rank]
        return max(self._last_advance)

    def _limit(self, rank: int) -> float:
        if self._work[rank] == "loading":
            return min(self._cancel, self._load) if self.cancelled else self._load
        if "compiling" in self._work:  # others wait for it
            return self._stall if self.cancelled else self._load
        if self._refused is not None:
            return min(self._cancel, self._stall) + max(0.0, self._refused - self._last_advance[rank])
        if self.cancelled and self._longest_step:
            return min(self._cancel + self._longest_step, self._stall)
        return self._stall
