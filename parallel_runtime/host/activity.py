"""Follows a group: what it is asked for, what its ranks say of themselves, how it starts and ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ..errors import ParallelError
from ..jobs import EvaluationJob, Job, VAEJob
from ..specs import ModelSpec, Parallelism, Placement
from ..wire.messages import Beat, Done, Joined, Step
from ..wire.readings import Busy, Readings
from .history import History, Size
from .journal import Journal
from .status import BUSY, CONVERTING, RESTING, Loss, RankStatus, Stage, State, Status

LAST_WORDS = 6  # lines of a worker that is gone
BETWEEN_EVALUATIONS = 2.0  # seconds in which a native sampler that evaluates here is still at work


class Activity:
    """`now` is what the group is doing. Outlives it, and what ended it while it recorded: `unrecordable` models are
    evaluated as they are by the next groups."""

    def __init__(self) -> None:
        self.now = Status()
        self.journal = Journal()
        self.history = History()
        self.unrecordable: set[ModelSpec] = set()
        self._asked: ModelSpec | None = None
        self._told: set[str] = set()
        self._evaluated = 0.0

    def starting(self, placement: Placement) -> None:
        devices = placement.devices * placement.nnodes
        ranks = tuple(RankStatus(rank=rank, device=device) for rank, device in enumerate(devices))
        self._become(Status(state="starting", placement=placement, ranks=ranks, steps=len(ranks)))

    def reached(self, stage: Stage, workers: int = 0) -> None:
        """The start is in this stage, and so many workers are through with it."""
        self._change(stage=stage, step=workers)

    def wanted(self, *, by_prompt: bool = False) -> None:
        """A run asks for the workers, or the prompt that it will be in: for another run, where nobody is at work."""
        if self.history.wanted is None or (by_prompt and self.now.state not in BUSY):
            self.history.wanted = time.time()

    def unwanted(self) -> None:
        """They start again, and for nobody."""
        self.history.wanted = None

    def of_size(self, size: Size) -> None:
        """What the next run, or the one that goes on, is asked to do."""
        self.history.size = size

    def joined(self, answers: dict[int, Joined], machines: list[str]) -> None:
        ranks = (
            replace(rank, machine=machines[rank.rank], readings=answers[rank.rank].readings) for rank in self.now.ranks
        )
        self._turn("idle", ranks=tuple(ranks), stage="", step=0, steps=0)

    def asked(self, model: ModelSpec, degrees: Parallelism, job: Job) -> None:
        """A request begins. Between two evaluations of one run nothing is said to begin."""
        name, self._asked = model.title, model.unpatched
        if isinstance(job, EvaluationJob) and self.now.state == "sampling" and self.now.model == name:
            return
        self._evaluated = 0.0
        if isinstance(job, VAEJob):
            self._turn("decoding" if job.method == "decode" else "encoding", model="", step=0, steps=0)
            return
        self.history.sampler = repr(getattr(job, "sampler", ""))
        ranks = tuple(replace(rank, loaded=0.0) for rank in self.now.ranks)
        self._turn("loading", model=name, degrees=degrees, step=0, steps=0, ranks=ranks)

    def heard(self, rank: int, message: Any) -> None:
        """What a rank says of itself and its work."""
        match message:
            case Beat(loaded=loaded, readings=readings, busy=busy):
                self._note(rank, 1.0 if loaded is None else loaded, readings, busy)
                if loaded is None and self.now.state == "loading":
                    self._turn("sampling")
            case Step(step=step, total=total):
                self._step(step, total)
            case Done(readings=readings):
                self._note(rank, 1.0, readings)

    def cancelling(self) -> None:
        self._turn("cancelling")

    def unrecorded(self) -> list[str]:
        """Why workers evaluate something as it is instead of recording it: what was not told before."""
        reasons = {reason for rank in self.now.ranks if rank.readings for reason in rank.readings.graphs.eager}
        news = sorted(f"{self.now.model}: {reason}" for reason in reasons)
        news = [reason for reason in news if reason not in self._told]
        self._told.update(news)
        return news

    def give_up_recording(self) -> bool:
        """The group is lost. Was it recording?"""
        recording = any(rank.busy == "recording" for rank in self.now.ranks)
        if recording and self._asked is not None:
            self.unrecordable.add(self._asked)
        return recording

    @property
    def replaying(self) -> bool:
        """Do workers replay what they have recorded?"""
        return any(rank.readings and rank.readings.graphs.replays for rank in self.now.ranks)

    def answered(self, job: Job) -> None:
        """Every rank has done what was asked."""
        self._evaluated = time.monotonic() if isinstance(job, EvaluationJob) else 0.0
        self._turn("sampling" if self._evaluated else "idle")

    def rest(self) -> None:
        """A native sampler has not asked for an evaluation for a while: its run is over."""
        over = self._evaluated and time.monotonic() - self._evaluated > BETWEEN_EVALUATIONS
        if over and self.now.state == "sampling":
            self._turn("idle")

    def cancelled(self) -> None:
        """The run is off and the workers are warm."""
        self._turn("cancelled")

    def emptied(self) -> None:
        """The workers hold no model any more: what was said of one is over."""
        if self.now.state in RESTING:
            self._turn("idle", model="", degrees=None, step=0, steps=0)

    def gone(self, worker: str, rank: int | None) -> None:
        """Seen at once; torchrun may take a second to say how it ended."""
        self._turn("died", reason=f"worker {worker} went away", loss=Loss(rank=rank, settled=False))

    def lost(self, error: ParallelError, *, wanted: bool = False) -> None:
        """The group is over; `wanted` where somebody ended it, and nothing went wrong."""
        self._turn("died", reason=str(error), loss=None if wanted else self._loss(error))

    def failed(self, error: BaseException) -> None:
        """The start came to nothing: by itself, or because nobody waits for it any more."""
        if isinstance(error, ParallelError):
            self._turn("unstarted", reason=str(error), loss=self._loss(error), stage="", step=0, steps=0)
        else:
            self.ended()

    def ended(self, reason: str = "") -> None:
        self._become(Status(reason=reason))

    def _loss(self, error: ParallelError) -> Loss:
        rank: int | None = getattr(error, "rank", None)
        lines = self.journal.tail(LAST_WORDS, rank) if rank is not None else []
        return Loss(rank=rank, words=tuple(line.text for line in lines))

    def _turn(self, state: State, **known: Any) -> None:
        since = self.now.since if state == self.now.state else time.time()
        self._become(replace(self.now, state=state, since=since, **known))

    def _become(self, now: Status) -> None:
        """Of what was known only what has been holds on."""
        if now.state != self.now.state:
            self.history.turned(self.now, now)
        self.now = replace(now, runs=self.history.runs)

    def _step(self, step: int, total: int) -> None:
        if self.now.state in CONVERTING:
            self._change(step=step, steps=total)
            return
        if self.now.state == "loading":
            self._turn("sampling")
        self._change(step=step + 1, steps=total)
        self.history.stepped(self.now, time.time())
        self._change(runs=self.history.runs)

    def _change(self, **known: Any) -> None:
        self.now = replace(self.now, **known)

    def _note(self, rank: int, loaded: float, readings: Readings | None, busy: Busy = "") -> None:
        ranks = list(self.now.ranks)
        if rank < len(ranks):
            ranks[rank] = replace(ranks[rank], loaded=loaded, readings=readings or ranks[rank].readings, busy=busy)
            self._change(ranks=tuple(ranks))
