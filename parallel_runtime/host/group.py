"""A running worker group: one request at a time, every rank asked, rank 0's answer returned. Crash-only."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Any

from ..errors import ParallelError, Refused, WorkerDied
from ..jobs import Job
from ..specs import ComfySetup, ModelSpec, Parallelism, Placement, Storage
from ..wire.bundles import bundled
from ..wire.messages import Cancel, Done, Measure, Run
from ..wire.readings import Readings
from .activity import Activity
from .balance import Balance
from .cost import Work
from .launch import Processes
from .limits import Limit, seconds_from, stall_limit
from .sent import Sent
from .status import BUSY
from .waiting import Patience, Waiting

log = logging.getLogger(__name__)

START_SECONDS = seconds_from("CP_START_SECONDS", 180)
LOAD_SECONDS = seconds_from("CP_LOAD_SECONDS", 600)
CANCEL_SECONDS = seconds_from("CP_CANCEL_SECONDS", 10)
UNLOAD_SECONDS = 10.0  # a group that takes longer to drop its models is ended, which drops them too

WHOLE = Storage()
WITHOUT_GRAPHS = "It was recording the model as CUDA graphs: the next runs of this model do without"

OnStep = Callable[[int, Any, Any, int], None]
Watch = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """`value` is what the workers' loop returned; the times are rank 0's, in seconds."""

    value: dict[str, Any]
    load_seconds: float
    seconds: float


class WorkerGroup:
    """Use as a context manager. After a ParallelError the group is dead, and gives the same to whoever asks on: start
    another. An exception that `watch` or `on_step` raises cancels the job on every rank, and the group stays warm."""

    def __init__(
        self,
        placement: Placement,
        comfy: ComfySetup | None = None,
        watch: Watch = lambda: None,
        activity: Activity | None = None,
        stall: Limit | None = None,
    ) -> None:
        self.placement = placement
        self.activity = activity or Activity()
        self.comfy = comfy
        self.stall = stall or stall_limit()
        self._jobs = itertools.count(1)
        self._sent = Sent()
        self.held: dict[ModelSpec, Any] = {}  # what its borrowers keep of each model that has its place there
        self._lost: ParallelError | None = None  # what ended the group
        self._sentence: ParallelError | None = None  # who ended it, where that was us
        self._processes = Processes(placement, self.activity)
        try:
            self.link = self._processes.meet(comfy, START_SECONDS, watch)
            self.balance = Balance(self.link, placement)
        except BaseException as error:
            self.close()
            self.activity.failed(error)
            raise

    @property
    def alive(self) -> bool:
        return self._processes.running()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks, in their order; other machines have theirs."""
        return tuple(self._processes.pids)

    @property
    def readings(self) -> tuple[Readings, ...]:
        """What each rank has said of itself last, in rank order; () where one has said nothing."""
        told = tuple(rank.readings for rank in self.activity.now.ranks if rank.readings is not None)
        return told if len(told) == len(self.activity.now.ranks) else ()

    def balanced(self, model: ModelSpec, degrees: Parallelism, work: Work) -> Parallelism:
        """With the shares that these workers can do at this moment, where nobody has chosen any. Workers of a pipeline
        pass equal parts on."""
        if degrees.shares or degrees.pipeline_degree > 1:
            return degrees
        return dataclasses.replace(degrees, shares=self.balance.shares(model, degrees, work))

    def holds(self, model: ModelSpec) -> bool:
        """Have the workers got `model`, weight patches and all?"""
        return self._sent.holds(model)

    def run(
        self,
        model: ModelSpec,
        parallelism: Parallelism,
        job: Job,
        *,
        storage: Storage = WHOLE,
        room: int | None = None,
        on_step: OnStep = lambda *_: None,
        watch: Watch = lambda: None,
    ) -> Result:
        """Run `job` on every rank and return rank 0's result. Raises Refused; the group and its models stay.

        `storage` says where the weights are meanwhile; the ranks of a VAE write into the memory file `room`. What the
        workers have of `job` already is not sent again.
        `on_step(step, x0, x, total)` follows the sampler's callback, and tells of a VAE's video how far it is;
        `watch` is called about every POLL_SECONDS.
        """
        assert parallelism.world_size == self.placement.world_size
        if self._lost is not None:
            raise self._lost
        number = next(self._jobs)
        self.activity.asked(model, parallelism, job)
        asked = parallelism
        if model.unpatched in self.activity.unrecordable:
            asked = dataclasses.replace(parallelism, cuda_graphs="off")
        try:
            with self._sent.all_of(job, model) as lean, bundled({"kind": type(job).__name__, **vars(lean)}) as bundle:
                if room is not None:
                    self._processes.make_room(number, room)
                self._processes.ask(Run(number, model, asked, storage), bundle)
                answers = self._answers(number, LOAD_SECONDS, on_step, watch)
        except Refused:
            raise
        except ParallelError as error:
            raise self._lose(error) from None
        finally:
            if self.activity.now.state in BUSY:
                self.activity.answered(job)
        for reason in self.activity.unrecorded():
            log.info("[CP] not recorded as CUDA graphs: %s", reason)
        done, result = answers[0]
        self.balance.learn(model, parallelism, [told.computed_seconds for told in self.readings])
        return Result(result, done.load_seconds, done.seconds)

    def unload(self, model: ModelSpec, *, offload: bool = False) -> None:
        """Have every rank give this model's memory back: drop it, or `offload` its weights to main memory."""
        if not offload:
            self._sent.drop(model)
        if not any(told.weights for told in self._told(UNLOAD_SECONDS, model=model, offload=offload)):
            self.activity.emptied()

    def measure(self, watch: Watch = lambda: None) -> tuple[Readings, ...]:
        """What each rank says of its memory at this moment, in rank order; `watch` as in `run`."""
        return self._told(LOAD_SECONDS, watch)

    def look(self) -> None:
        """Notice that an idle group has lost a worker."""
        if self._lost is None and not self.alive:
            self._lose(self._processes.loss())

    def kill(self, reason: str) -> None:
        """End every process at once, also under a run, which then raises WorkerDied with this reason."""
        self._sentence = WorkerDied(reason)
        self._processes.kill()

    def close(self) -> None:
        self._processes.close()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _told(self, limit: float, watch: Watch = lambda: None, **freed: Any) -> tuple[Readings, ...]:
        """What each rank says of itself, after what is to be `freed`, in a Measure's words."""
        if self._lost is not None:
            raise self._lost
        number = next(self._jobs)
        try:
            self._processes.ask(Measure(number, **freed))
            self._answers(number, limit, lambda *_: None, watch)
        except ParallelError as error:
            raise self._lose(error) from None
        return self.readings

    def _answers(self, job: int, limit: float, on_step: OnStep, watch: Watch) -> dict[int, tuple[Done, Any]]:
        ranks, stall = len(self._processes.channels), float(self.stall)
        patience = Patience(ranks, load=limit, stall=stall, cancel=CANCEL_SECONDS)
        waiting = Waiting(self._processes, job, patience, self.activity)
        try:
            while not waiting.over:
                watch()
                for step, x0, x, total in waiting.listen():
                    on_step(step, x0, x, total)
        except ParallelError:
            raise
        except BaseException:
            self._cancel(waiting, job)
            raise
        return waiting.agreed()

    def _cancel(self, waiting: Waiting, job: int) -> None:
        """Stop the job on every rank. What goes wrong here ends the group; the caller's exception is the news."""
        waiting.patience.cancelled = True
        self.activity.cancelling()
        try:
            self._processes.ask(Cancel(job))
            while not waiting.over:
                for _ in waiting.listen():
                    pass
            self.activity.cancelled()
        except ParallelError as error:
            self._lose(error)

    def _lose(self, error: ParallelError) -> ParallelError:
        """The group is over. What to raise."""
        if self._sentence is None and self.activity.give_up_recording():
            error.args = (f"{error}. {WITHOUT_GRAPHS}",)
        self._lost = self._sentence or error
        self.activity.lost(self._lost, wanted=self._sentence is not None)
        self.close()
        return self._lost
