"""Tracks the state of the worker group: its start, requests, heartbeats of its ranks, and its end."""

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import ParallelError, Refused, WorkerLost, WorkerStartError, say
from ..jobs import EncodingJob, EvaluationJob, Job, VAEJob
from ..specs import ModelSpec, Parallelism, Placement
from ..wire.messages import Busy, Done, Heartbeat, Joined, Readings, Step
from .group_status import CONVERTING, RESTING, Journal, Loss, RankStatus, Stage, State, Status
from .history import History, LeasedFor

LAST_LINES = 6  # printed lines shown of a worker that has ended


class Activity:
    """The state of the process's groups, one after another. `now` is the current Status. A model whose recording ended
    a group is in `unrecordable`: later groups evaluate it eagerly."""

    def __init__(self) -> None:
        self.now = Status()
        self.journal = Journal()
        self.history = History()
        self.unrecordable: set[ModelSpec] = set()
        self._model: ModelSpec | None = None
        self._logged_reasons: set[str] = set()

    def starting(self, placement: Placement) -> None:
        devices = placement.devices * placement.nnodes
        ranks = tuple(RankStatus(rank=rank, device=device) for rank, device in enumerate(devices))
        self._replace_status(Status(state="starting", placement=placement, ranks=ranks, steps=len(ranks)))

    def set_stage(self, stage: Stage, workers: int = 0) -> None:
        """Sets the stage of the start, and the number of workers that have finished it."""
        self._change(stage=stage, step=workers)

    @contextmanager
    def recorded(
        self, work: LeasedFor, prompt: Hashable = None, model: str = "", *, goes_on: bool = False
    ) -> Iterator[None]:
        """The history's record of what runs in this context, as `prompt` wants it. `goes_on`: it is one evaluation of a
        run, whose record goes on until `end_evaluations`."""
        opened, how, reason = self.history.open(work, prompt, model), "idle", ""
        try:
            yield
        except BaseException as error:
            how = "died" if isinstance(error, ParallelError) else "cancelled"
            if isinstance(error, Refused):
                how, reason = "refused", error.sentence
            if isinstance(error, WorkerStartError):
                how = "unstarted"
            raise
        finally:
            if (opened and not goes_on) or (goes_on and how != "idle"):
                self._close_record(how, reason)

    def joined(self, answers: dict[int, Joined], machines: list[str]) -> None:
        known = [(rank, machines[rank.rank], answers[rank.rank].readings) for rank in self.now.ranks]
        ranks = tuple(replace(rank, machine=machine, readings=readings) for rank, machine, readings in known)
        self._set_state("idle", ranks=ranks, stage="", step=0, steps=0)

    def begin_request(self, model: ModelSpec, degrees: Parallelism, job: Job) -> None:
        """A request begins. Between two evaluations of one run the state stays as it is."""
        same_model = self._model == model.unpatched
        self._model = model.unpatched
        if isinstance(job, EvaluationJob) and self.now.state == "sampling" and same_model:
            return
        if isinstance(job, VAEJob):
            self._set_state("decoding" if job.method == "decode" else "encoding", model="", step=0, steps=0)
            return
        if isinstance(job, EncodingJob):
            self._set_state("encoding", model=model.title, step=0, steps=0)
            return
        self.history.sampler = repr(getattr(job, "sampler", ""))
        ranks = tuple(replace(rank, loaded=0.0) for rank in self.now.ranks)
        self._set_state("loading", model=model.title, degrees=degrees, step=0, steps=0, ranks=ranks)

    def receive(self, rank: int, message: Any) -> None:
        """Takes a message of a rank about its state and work."""
        match message:
            case Heartbeat(loaded=loaded, readings=readings, busy=busy):
                self._update_rank(rank, 1.0 if loaded is None else loaded, readings, busy)
                if loaded is None and self.now.state == "loading":
                    self._set_state("sampling")
            case Step(step=step, total=total):
                self._step(step, total)
            case Done(readings=readings):
                self._update_rank(rank, 1.0, readings)

    def cancelling(self) -> None:
        self._set_state("cancelling")

    def new_eager_reasons(self) -> list[str]:
        """Returns why workers evaluate something eagerly instead of recording it; each reason once a process."""
        eager = {reason for rank in self.now.ranks if rank.readings for reason in rank.readings.graphs.eager}
        new = {f"{self.now.model}: {reason}" for reason in eager} - self._logged_reasons
        self._logged_reasons |= new
        return sorted(new)

    def give_up_recording(self) -> bool:
        """The group has ended. Returns whether it was recording, and does not record that model again."""
        recording = any(rank.busy == "recording" for rank in self.now.ranks)
        if recording and self._model is not None:
            self.unrecordable.add(self._model)
        return recording

    @property
    def replaying(self) -> bool:
        """Have workers replayed a recorded forward?"""
        return any(rank.readings and rank.readings.graphs.replays for rank in self.now.ranks)

    def end_request(self, job: Job) -> None:
        """Every rank has finished the request. After an evaluation the run goes on until `end_evaluations`."""
        self._set_state("sampling" if isinstance(job, EvaluationJob) else "idle")

    def end_evaluations(self) -> None:
        """The run of a sampler in ComfyUI's process is over."""
        if self.now.state == "sampling":
            self._set_state("idle")
        self._close_record("idle")

    def cancelled(self) -> None:
        """The run was cancelled, and the workers keep their models."""
        self.journal.note("[CP] the run was cancelled")
        self._set_state("cancelled")

    def models_unloaded(self) -> None:
        """The workers have unloaded all models: clears what the status says of one."""
        if self.now.state in RESTING:
            self._set_state("idle", model="", degrees=None, step=0, steps=0)

    def refused(self, reason: str) -> None:
        """A run was refused: by the workers while they are at it, or before it began."""
        self.history.refused(reason, time.time())
        self._change(runs=self.history.runs)

    def rank_gone(self, worker: str, rank: int) -> None:
        """A rank has hung up. The cause follows in `lost`: torchrun may take a second to report it."""
        self._set_state("died", reason=say("died.gone", worker=worker), loss=Loss(rank=rank, settled=False))

    def lost(self, error: ParallelError, *, intended: bool = False) -> None:
        """The group has ended; `intended` where it was ended on request."""
        loss = None if intended else self._loss(error)
        self.journal.note(f"[CP] the workers ended: {error}")
        self._set_state("died", reason=error.sentence, loss=loss)

    def failed(self, error: BaseException) -> None:
        """The start has failed, or was cancelled."""
        if isinstance(error, ParallelError):
            self._set_state("unstarted", reason=error.sentence, loss=self._loss(error), stage="", step=0, steps=0)
        else:
            self.ended()

    def ended(self, reason: str = "") -> None:
        self._replace_status(Status(reason=reason))

    def _loss(self, error: ParallelError) -> Loss:
        cause = error.cause if isinstance(error, WorkerLost) else None
        if cause is None:
            return Loss()
        lines = self.journal.tail(LAST_LINES, cause.rank)
        return Loss(rank=cause.rank, kind=cause.kind, words=tuple(line.text for line in lines))

    def _set_state(self, state: State, **known: Any) -> None:
        if state != self.now.state:
            known |= {"since": time.time(), "began_at": time.monotonic()}
        self._replace_status(replace(self.now, state=state, **known))

    def _replace_status(self, now: Status) -> None:
        """Replaces the status; only the history is kept."""
        if now.state != self.now.state:
            self.history.state_changed(now)
        self.now = replace(now, runs=self.history.runs)

    def _step(self, step: int, total: int) -> None:
        if self.now.state in CONVERTING:
            self._change(step=step, steps=total)
            return
        if self.now.state == "loading":
            self._set_state("sampling")
        self._change(step=step + 1, steps=total)
        self.history.step_done(self.now, time.monotonic())
        self._change(runs=self.history.runs)

    def _close_record(self, how: str, reason: str = "") -> None:
        self.history.close(how, reason)
        self._change(runs=self.history.runs)

    def _change(self, **known: Any) -> None:
        self.now = replace(self.now, **known)

    def _update_rank(self, rank: int, loaded: float, readings: Readings | None, busy: Busy = "") -> None:
        ranks = list(self.now.ranks)
        if rank < len(ranks):
            ranks[rank] = replace(ranks[rank], loaded=loaded, readings=readings or ranks[rank].readings, busy=busy)
            self._change(ranks=tuple(ranks))
