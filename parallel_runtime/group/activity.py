"""The state of the worker group: its start, requests, heartbeats of its ranks, and its end. The status is one frozen
value, which is replaced, never changed: readers need no lock."""

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ParallelError, Refused, WorkerLost, WorkerStartError, say
from ..jobs import EncodingJob, EvaluationJob, Job, VAEJob
from ..specs import ModelSpec, Parallelism, Placement
from ..wire.messages import SHOWN, Busy, Done, Heartbeat, Joined, Readings, Step
from .history import PHASES, History, LeasedFor, PastRun
from .torchrun import Journal

State = Literal[
    "none", "starting", "unstarted", "loading", "sampling", "decoding", "encoding", "cancelling", "cancelled", "idle",
    "died",
]  # fmt: skip
# Of a start: waiting for other machines; waiting for workers, which import PyTorch; workers import ComfyUI, form the
# process group and measure.
Stage = Literal["", "machines", "processes", "meeting"]
BUSY = (*PHASES, "cancelling")
RESTING = ("idle", "cancelled")
LAST_LINES = 6  # printed lines shown of a worker that has ended


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One worker. `machine` is "" for this machine; `loaded` is the fraction of the model that it has loaded."""

    rank: int
    device: str
    machine: str = ""
    loaded: float = 0.0
    readings: Readings | None = None
    busy: Busy = ""

    @property
    def shown(self) -> dict[str, float | None]:
        """What the page shows of the readings, each None if unknown."""
        values = {name: getattr(self.readings, name, None) for name in SHOWN}
        return values | {"step_seconds": values["step_seconds"] or None}  # 0 before the first step


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How a group was lost: the rank that failed first, None if none did, the kind of its Cause, and its last printed
    lines. Until `settled` is set the cause may change."""

    rank: int | None = None
    kind: str = ""
    words: tuple[str, ...] = ()
    settled: bool = True


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of the group. `reason` says why it died or ended. `step` of `steps` counts sampling steps, frames of a
    VAE's video, or workers that are up in this `stage` of a start; both are 0 where the sampler runs in ComfyUI's
    process. `since` is the time, in seconds of the epoch, at which `state` began, and `began_at` the same by
    time.monotonic: the clock of the epoch may be set meanwhile."""

    state: State = "none"
    stage: Stage = ""
    loss: Loss | None = None
    reason: str = ""
    since: float = field(default_factory=lambda: time.time())
    began_at: float = field(default_factory=lambda: time.monotonic())
    placement: Placement | None = None
    degrees: Parallelism | None = None
    model: str = ""
    step: int = 0
    steps: int = 0
    ranks: tuple[RankStatus, ...] = ()
    runs: tuple[PastRun, ...] = ()

    @property
    def loaded(self) -> float:
        """The fraction of the model that the slowest rank has loaded."""
        return min((rank.loaded for rank in self.ranks), default=0.0)


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

    def set_state(self, state: State, **known: Any) -> None:
        """Sets the state, and `known` fields of the status."""
        if state != self.now.state:
            known |= {"since": time.time(), "began_at": time.monotonic()}
        self._replace_status(replace(self.now, state=state, **known))

    @contextmanager
    def recorded(
        self, work: LeasedFor, prompt: Hashable = None, model: str = "", *, goes_on: bool = False
    ) -> Iterator[None]:
        """The history's record of what runs in this context, as `prompt` wants it. `goes_on`: it is one evaluation of a
        run, whose record goes on until `end_evaluations`."""
        opened, how, reason = self.history.open(work, prompt, model), "idle", ""
        try:
            yield
        except Refused as error:
            how, reason = "refused", error.sentence
            raise
        except BaseException as error:
            lost = "unstarted" if isinstance(error, WorkerStartError) else "died"
            how = lost if isinstance(error, ParallelError) else "cancelled"
            raise
        finally:
            if (opened and not goes_on) or (goes_on and how != "idle"):
                self._close_record(how, reason)

    def joined(self, answers: dict[int, Joined], machines: list[str]) -> None:
        known = [(rank, machines[rank.rank], answers[rank.rank].readings) for rank in self.now.ranks]
        ranks = tuple(replace(rank, machine=machine, readings=readings) for rank, machine, readings in known)
        self.set_state("idle", ranks=ranks, stage="", step=0, steps=0)

    def begin_request(self, model: ModelSpec, degrees: Parallelism, job: Job) -> None:
        """A request begins. Between two evaluations of one run the state stays as it is."""
        same_model = self._model == model.unpatched
        self._model = model.unpatched
        if isinstance(job, EvaluationJob) and self.now.state == "sampling" and same_model:
            return
        if isinstance(job, VAEJob):
            self.set_state("decoding" if job.method == "decode" else "encoding", model="", step=0, steps=0)
            return
        if isinstance(job, EncodingJob):
            self.set_state("encoding", model=model.title, step=0, steps=0)
            return
        self.history.sampler = repr(getattr(job, "sampler", ""))
        ranks = tuple(replace(rank, loaded=0.0) for rank in self.now.ranks)
        self.set_state("loading", model=model.title, degrees=degrees, step=0, steps=0, ranks=ranks)

    def receive(self, rank: int, message: Any) -> None:
        """Takes a message of a rank about its state and work."""
        match message:
            case Heartbeat(loaded=loaded, readings=readings, busy=busy):
                self._update_rank(rank, 1.0 if loaded is None else loaded, readings, busy)
                if loaded is None and self.now.state == "loading":
                    self.set_state("sampling")
            case Step(step=step, total=total) if self.now.state in ("decoding", "encoding"):
                self._change(step=step, steps=total)
            case Step(step=step, total=total):
                if self.now.state == "loading":
                    self.set_state("sampling")
                known = [one.readings for one in self.now.ranks if one.readings and one.readings.step_seconds]
                shares = [one.waited_seconds / one.step_seconds for one in known if one.waited_seconds is not None]
                self.history.step_done(step + 1, total, min(1.0, sum(shares) / len(shares)) if shares else None)
                self._change(step=step + 1, steps=total, runs=self.history.runs)
            case Done(readings=readings):
                self._update_rank(rank, 1.0, readings)

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

    def end_request(self, job: Job) -> None:
        """Every rank has finished the request. After an evaluation the run goes on until `end_evaluations`."""
        self.set_state("sampling" if isinstance(job, EvaluationJob) else "idle")

    def end_evaluations(self) -> None:
        """The run of a sampler in ComfyUI's process is over."""
        if self.now.state == "sampling":
            self.set_state("idle")
        self._close_record("idle")

    def cancelled(self) -> None:
        """The run was cancelled, and the workers keep their models."""
        self.journal.note("[CP] the run was cancelled")
        self.set_state("cancelled")

    def models_unloaded(self) -> None:
        """The workers have unloaded all models: clears what the status says of one."""
        if self.now.state in RESTING:
            self.set_state("idle", model="", degrees=None, step=0, steps=0)

    def refused(self, reason: str) -> None:
        """A run was refused: by the workers while they are at it, or before it began."""
        self.history.refused(reason)
        self._change(runs=self.history.runs)

    def rank_gone(self, worker: str, rank: int) -> None:
        """A rank has hung up. The cause follows in `lost`: torchrun may take a second to report it."""
        self.set_state("died", reason=say("died.gone", worker=worker), loss=Loss(rank=rank, settled=False))

    def lost(self, error: ParallelError, *, intended: bool = False) -> None:
        """The group has ended; `intended` where it was ended on request."""
        loss = None if intended else self._loss(error)
        self.journal.note(f"[CP] the workers ended: {error}")
        self.set_state("died", reason=error.sentence, loss=loss)

    def failed(self, error: BaseException) -> None:
        """The start has failed, or was cancelled."""
        if isinstance(error, ParallelError):
            self.set_state("unstarted", reason=error.sentence, loss=self._loss(error), stage="", step=0, steps=0)
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

    def _replace_status(self, now: Status) -> None:
        """Replaces the status; only the history is kept."""
        if now.state != self.now.state:
            self.history.state_changed(now.state, now.began_at, now.placement, now.degrees)
        self.now = replace(now, runs=self.history.runs)

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
