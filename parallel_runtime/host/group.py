"""A running worker group: one request at a time, every rank asked, rank 0's answer returned. Crash-only."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from typing import Any

from ..errors import ParallelError, Refused, WorkerDied, WorkerFailed
from ..specs import ComfySetup, Job, ModelSpec, Parallelism, Placement
from ..wire.bundles import read_bundle, write_bundle
from ..wire.messages import Beat, Cancel, Done, Failed, Sample, Step, Stop, Unload
from .launch import POLL_SECONDS, Processes
from .patience import Patience

log = logging.getLogger(__name__)


def seconds_from(variable: str, default: float) -> float:
    """A limit from the environment; what is no number of seconds is said and not used."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if math.isfinite(seconds) and seconds >= 0 and (seconds or not default):
            return seconds
    log.warning("[CP] %s=%r is no number of seconds that can be waited; %g is used", variable, text, default)
    return default


START_SECONDS = seconds_from("CP_START_SECONDS", 180)
STALL_SECONDS = seconds_from("CP_STALL_SECONDS", 120)
LOAD_SECONDS = seconds_from("CP_LOAD_SECONDS", 600)
CANCEL_SECONDS = seconds_from("CP_CANCEL_SECONDS", 10)
UNLOAD_SECONDS = 10.0  # a group that takes longer to drop its models is ended, which drops them too
FAILURE_SECONDS = 0.3

OnStep = Callable[[int, Any, Any, int], None]


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
        self, placement: Placement, comfy: ComfySetup | None = None, watch: Callable[[], None] = lambda: None
    ) -> None:
        self.placement = placement
        self.comfy = comfy
        self._jobs = itertools.count(1)
        self._patches: dict[ModelSpec, str] = {}  # of each model that the workers hold
        self._lost: ParallelError | None = None  # what ended the group
        self._processes = Processes(placement)
        try:
            self.link = self._processes.meet(comfy, START_SECONDS, watch)
        except BaseException:
            self.close(gently=False)
            raise

    @property
    def alive(self) -> bool:
        return self._processes.running()

    def holds(self, model: ModelSpec) -> bool:
        """Have the workers got `model`, weight patches and all?"""
        return self._patches.get(model.unpatched) == model.patches

    def sample(
        self,
        model: ModelSpec,
        parallelism: Parallelism,
        job: Job,
        *,
        on_step: OnStep = lambda *_: None,
        watch: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run `job` on every rank and return rank 0's result.

        `on_step(step, x0, x, total)` follows the sampler's callback; `watch` is called about every POLL_SECONDS.
        """
        assert parallelism.world_size == self.placement.world_size
        if self._lost is not None:
            raise self._lost
        number = next(self._jobs)
        self._patches.pop(model.unpatched, None)
        bundle = write_bundle({"kind": type(job).__name__, **vars(job)})
        try:
            self._ask(Sample(number, model, parallelism), bundle)
            answers = self._answers(number, LOAD_SECONDS, on_step, watch)
        except Refused:
            raise
        except ParallelError as error:
            self._lose(error)
            raise
        finally:
            os.close(bundle)
        self._patches[model.unpatched] = model.patches
        done, result = answers[0]
        return Result(result, done.load_seconds, done.seconds)

    def unload(self, model: ModelSpec, *, offload: bool = False) -> None:
        """Have every rank give this model's memory back: drop it, or `offload` its weights to main memory."""
        number = next(self._jobs)
        if not offload:
            self._patches.pop(model.unpatched, None)
        try:
            self._ask(Unload(number, model, offload))
            self._answers(number, UNLOAD_SECONDS, lambda *_: None, lambda: None)
        except ParallelError as error:
            self._lose(error)
            raise

    def close(self, *, gently: bool = True) -> None:
        if gently:
            with contextlib.suppress(OSError):
                for channel in self._processes.channels:
                    channel.send(Stop())
        self._processes.close(gently=gently)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, message: Any, bundle: int | None = None) -> None:
        """`bundle` goes to the ranks of this machine; where there are several, to rank 0, which passes it on."""
        for rank, channel in enumerate(self._processes.channels):
            copy = None
            if bundle is not None and (rank == 0 or self.placement.nnodes == 1):
                copy = os.dup(bundle)
            try:
                channel.send(message, copy)
            except OSError:
                raise self._processes.died(rank) from None

    def _answers(
        self, job: int, limit: float, on_step: OnStep, watch: Callable[[], None]
    ) -> dict[int, tuple[Done, Any]]:
        waiting = _Waiting(self._processes, job, limit)
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
        return waiting.answers

    def _cancel(self, waiting: _Waiting, job: int) -> None:
        """Stop the job on every rank. What goes wrong here ends the group; the caller's exception is the news."""
        waiting.patience.cancelled = True
        try:
            self._ask(Cancel(job))
            while not waiting.over:
                for _ in waiting.listen():
                    pass
        except ParallelError as error:
            self._lose(error)

    def _lose(self, error: ParallelError) -> None:
        self._lost = error
        self.close(gently=False)


class _Waiting:
    """The answers to one request, as they come in."""

    def __init__(self, processes: Processes, job: int, limit: float) -> None:
        self.answers: dict[int, tuple[Done, Any]] = {}
        self._processes = processes
        self._channels = processes.channels
        self._job = job
        self.patience = Patience(len(self._channels), load=limit, stall=STALL_SECONDS, cancel=CANCEL_SECONDS)

    @property
    def over(self) -> bool:
        return len(self.answers) == len(self._channels)

    def listen(self) -> list[tuple[int, Any, Any, int]]:
        """Wait up to POLL_SECONDS for what the ranks say; the steps that rank 0 reported, oldest first."""
        steps = []
        for rank in self._ready(POLL_SECONDS):
            message, bundle = self._receive(rank)
            value: Any = read_bundle(bundle) if bundle is not None else None
            if getattr(message, "job", self._job) != self._job:
                continue
            self.patience.hear(rank)
            match message:
                case Failed():
                    raise self._root_cause(message)
                case Step(step=step, total=total):
                    steps.append((step, value["x0"], value["x"], total))
                case Done():
                    self.answers[rank] = (message, value)
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
            raise WorkerDied(
                f"worker {self._processes.named(lost[0])} has not been heard of for {lost[1]:.0f} s; "
                "the next run starts fresh workers"
            )
