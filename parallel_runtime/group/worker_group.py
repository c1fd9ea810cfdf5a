"""A running worker group: sends one request at a time to every rank and returns the result. Crash-only.

What the workers have is not sent again: weight patches, a VAE's weights, and the conditions of an evaluation. A
network's own weights are never sent, and a SamplingJob always has its conditions. What workers give back may be written
into a `SharedOutput`, which ComfyUI then uses without a copy."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ParallelError, Refused, WorkerDied, say
from ..jobs import MAX_CACHED_CONDS, EncodingJob, EvaluationJob, Job, SamplingJob, VAEJob, answering_ranks
from ..planning.run_plan import REPLICATED
from ..planning.seconds import ShareBalance
from ..request import AfterSampling
from ..specs import ComfySetup, ModelSpec, Parallelism, Placement, WeightPlacement
from ..wire.bundles import LIMIT, bundled, empty_bundle, too_large
from ..wire.messages import Cancel, Done, Measure, Readings, Run
from .activity import BUSY, Activity
from .launch import start_workers
from .machines import seconds_from
from .waiting import SilenceLimits, Waiting

log = logging.getLogger(__name__)

# Seconds without progress of a worker that samples; a setting of ComfyUI's, and so in web/settings.js too. All four are
# in docs/environment-variables.md.
STALL_DEFAULT = 120.0
STALL_SECONDS = seconds_from("CP_STALL_SECONDS", STALL_DEFAULT)
START_SECONDS = seconds_from("CP_START_SECONDS", 180)
LOAD_SECONDS = seconds_from("CP_LOAD_SECONDS", 600)  # the same of one that loads or compiles
CANCEL_SECONDS = seconds_from("CP_CANCEL_SECONDS", 10)
ANSWER_SECONDS = 20.0  # for the readings of an idle group, which it answers at once
UNLOAD_SECONDS = 10.0  # a group that takes longer to drop its models is ended, which drops them too

OnStep = Callable[[int, Any, Any, int], None]
Watch = Callable[[], None]


@dataclass(frozen=True)
class Result:
    """The result of a run: `value` is what the loops of the answering ranks returned; the times are the longest of
    theirs."""

    value: dict[str, Any]
    load_seconds: float
    seconds: float


def check_size(value: Any) -> None:
    """Raises Refused for weights or conditions with more bytes than one bundle may have, before workers start."""
    sizes = {id(leaf): leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    if (total := sum(sizes.values())) > LIMIT:
        raise too_large(total)


class PayloadCache:
    """What the workers of one group have of each model, for as long as the group lives."""

    def __init__(self) -> None:
        # By model without patches: the fingerprint of the weight patches that workers have. A VAE has an entry if they
        # have its weights.
        self._patches_fingerprints: dict[ModelSpec, str] = {}
        self._cond_arguments: dict[ModelSpec, list[tuple[int, dict[str, Any]]]] = {}
        self._last_number = 0

    def has_model(self, model: ModelSpec) -> bool:
        """Do the workers have `model`, with its weight patches?"""
        return self._patches_fingerprints.get(model.unpatched) == model.patches_fingerprint

    def free(self, model: ModelSpec, after: AfterSampling) -> None:
        """The workers have freed this model's conditions, and the model too if they `unload` it."""
        self._cond_arguments.pop(model.unpatched, None)
        if after == "unload":
            self._patches_fingerprints.pop(model.unpatched, None)

    @contextmanager
    def unsent_parts(self, job: Job, model: ModelSpec) -> Iterator[Job]:
        """Yields the job without what the workers have. If the block does not raise, the workers have all of it; until
        then they count as having no weight patches of this model.

        A LoRA's new strength is another `patches_fingerprint`, so it sends all weight patches of the MODEL and of its
        partner again. A SamplingJob's other fields are sent in each run, an EvaluationJob's conditions once."""
        has_patches = self.has_model(model)
        try:
            match job:
                case SamplingJob() if has_patches:
                    job = replace(job, weight_patches=[None for _ in job.weight_patches])
                case EvaluationJob() | EncodingJob() if has_patches:
                    job = replace(job, weight_patches=None)
                case VAEJob() if has_patches:
                    job = replace(job, weights=None)
            self._patches_fingerprints.pop(model.unpatched, None)
            if isinstance(job, EvaluationJob):
                # By value, as ComfyUI changes conditions in place, under one uuid.
                sent = self._cond_arguments.get(model.unpatched, [])
                known = next((number for number, conds in sent if equal(conds, job.cond_arguments)), None)
                if known is None:
                    self._last_number += 1
                    conds = pytree.tree_map_only(torch.Tensor, torch.clone, job.cond_arguments or {})
                    self._cond_arguments[model.unpatched] = [*sent, (self._last_number, conds)][-MAX_CACHED_CONDS:]
                    job = replace(job, cond_number=self._last_number)
                else:
                    job = replace(job, cond_number=known, cond_arguments=None)
            yield job
        except BaseException as error:
            self._cond_arguments = {}
            if has_patches and isinstance(error, Refused):
                self._patches_fingerprints[model.unpatched] = model.patches_fingerprint
            raise
        self._patches_fingerprints[model.unpatched] = model.patches_fingerprint


class WorkerGroup(AbstractContextManager["WorkerGroup"]):
    """A context manager. A ParallelError ends the group, and later requests raise it again: start another group. An
    exception that `watch` or `on_step` raises cancels the job on every rank, and the group stays."""

    def __init__(
        self,
        placement: Placement,
        comfy: ComfySetup | None = None,
        watch: Watch = lambda: None,
        activity: Activity | None = None,
        stall: Callable[[], float] = lambda: STALL_SECONDS,
    ) -> None:
        self.placement = placement
        self.activity = activity or Activity()
        self.comfy = comfy
        self.stall = stall  # returns the seconds, which may change at any time
        self._jobs = itertools.count(1)
        self.payloads = PayloadCache()
        self.models: dict[ModelSpec, Any] = {}  # nodes/remote lists its GroupModels here, the last used one last
        self.in_run = False  # if set on the run's own thread, the code is called from the run's `on_step` or `watch`
        self._longest_evaluations: dict[Any, float] = {}  # seconds, by model, degrees and size
        self._error: ParallelError | None = None  # what ended the group
        self._kill_error: ParallelError | None = None  # the error of `kill`
        try:
            self._processes, self.profile = start_workers(placement, self.activity, comfy, START_SECONDS, watch)
        except BaseException as error:
            self.activity.failed(error)
            raise
        self.balance = ShareBalance(placement)

    @property
    def alive(self) -> bool:
        return self._processes.running()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids in rank order; those of other machines are ids there."""
        return tuple(self._processes.pids)

    @property
    def readings(self) -> tuple[Readings, ...]:
        """The last readings of each rank, in rank order; () where a rank has sent none."""
        readings = tuple(rank.readings for rank in self.activity.now.ranks if rank.readings is not None)
        return readings if len(readings) == len(self.activity.now.ranks) else ()

    def run(
        self,
        model: ModelSpec,
        parallelism: Parallelism,
        job: Job,
        *,
        weight_placement: WeightPlacement = REPLICATED,
        output: int | None = None,
        on_step: OnStep = lambda *_: None,
        watch: Watch = lambda: None,
    ) -> Result:
        """Run `job` on every rank and return its result. Raises Refused; the group and its models stay.

        The ranks of a VAE write into the memory file `output`. Parts of `job` that the workers have are not sent again.
        `on_step(step, x0, x, total)` has the arguments of the sampler's callback, and reports the frames of a VAE's
        video and the tokens of a text; `watch` is called about every POLL_SECONDS.
        """
        assert parallelism.world_size == self.placement.world_size
        if self._error is not None:
            raise self._error
        self.activity.begin_request(model, parallelism, job)
        unrecordable = model.unpatched in self.activity.unrecordable
        effective = parallelism.with_options(cuda_graphs="off") if unrecordable else parallelism
        size = (model, effective, job.shapes) if isinstance(job, EvaluationJob) else None
        longest = self._longest_evaluations.get(size, 0.0)
        message = Run(next(self._jobs), model, effective, weight_placement)
        self.in_run = True
        try:
            with (
                self.payloads.unsent_parts(job, model) as payload,
                bundled({"kind": type(job).__name__, **vars(payload)}) as bundle,
            ):
                answers = self._answers(message, LOAD_SECONDS, on_step, watch, longest, bundle, output)
        finally:
            self.in_run = False
            if self.activity.now.state in BUSY:
                self.activity.end_request(job)
        for reason in self.activity.new_eager_reasons():
            log.info("[CP] not recorded as a CUDA graph: %s", reason)
        dones, values = zip(*(answers[rank] for rank in answering_ranks(job)), strict=True)
        load_seconds, seconds = max(done.load_seconds for done in dones), max(done.seconds for done in dones)
        if size is not None:
            self._longest_evaluations[size] = max(longest, seconds)
        self.balance.learn(model, parallelism, [reading.computed_seconds for reading in self.readings])
        return Result({name: value for returned in values for name, value in returned.items()}, load_seconds, seconds)

    def free(self, model: ModelSpec, after: AfterSampling = "unload") -> None:
        """Frees this model's conditions on every rank, and keeps, offloads or unloads its weights."""
        self.payloads.free(model, after)
        if not any(reading.weights for reading in self._measure(UNLOAD_SECONDS, model=model, after=after)):
            self.activity.models_unloaded()

    def evict_graphs(self, model: ModelSpec) -> None:
        """Evicts this model's recorded forwards on every rank; its next run records again."""
        self._measure(UNLOAD_SECONDS, model=model, recordings=True)

    def give_back(self, model: ModelSpec, ranks: Sequence[int], nbytes: int) -> None:
        """Has each of these ranks move weights of `nbytes` from its device until the next run of this model, and all
        ranks evict its recorded forwards: these are replayed on all or none."""
        self._measure(UNLOAD_SECONDS, model=model, recordings=True, ranks=tuple(ranks), nbytes=nbytes)

    def connect(self, parallelism: Parallelism, *, sharded: bool, watch: Watch = lambda: None) -> None:
        """Has the workers make the communicators of these degrees, and those of a shard, unless they have them: the
        memory that NCCL takes for them is in the readings then."""
        self._measure(LOAD_SECONDS, watch, degrees=parallelism, sharded=sharded)

    def measure(self, watch: Watch = lambda: None) -> tuple[Readings, ...]:
        """Returns the current readings of each rank, in rank order; `watch` is called as in `run`."""
        return self._measure(ANSWER_SECONDS, watch)

    def check_alive(self) -> None:
        """Ends an idle group that has lost a worker."""
        if self._error is None and not self.alive:
            self._lose(self._processes.loss())

    def kill(self, reason: str) -> None:
        """Ends every process at once; a run in progress then raises WorkerDied with this reason."""
        self._kill_error = WorkerDied(reason)
        self._processes.kill()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._processes.close()

    def _measure(self, limit: float, watch: Watch = lambda: None, **freed: Any) -> tuple[Readings, ...]:
        """Does what the fields `freed` of a Measure say, and returns each rank's readings."""
        self._answers(Measure(next(self._jobs), **freed), limit, lambda *_: None, watch)
        return self.readings

    def _answers(
        self, message: Run | Measure, limit: float, on_step: OnStep, watch: Watch, longest_step: float = 0.0,
        bundle: int | None = None, output: int | None = None,
    ) -> dict[int, tuple[Done, Any]]:  # fmt: skip
        """Sends a message to every rank, and returns their answers. Raises Refused; another ParallelError has ended the
        group. A rank may load for `limit` seconds; `bundle` and `output` are memory files that go along."""
        if self._error is not None:
            raise self._error
        ranks, stall = len(self._processes.channels), self.stall()
        if isinstance(message, Measure):
            stall = min(stall, limit)  # it is answered within its limit, however long a run may be silent
        limits = SilenceLimits(ranks, load=limit, stall=stall, cancel=CANCEL_SECONDS, longest_step=longest_step)
        waiting = Waiting(self._processes, message.job, limits, self.activity)
        try:
            self._processes.ask(message, bundle, output)
            try:
                while not waiting.all_answered:
                    watch()
                    for step, x0, x, total in waiting.listen():
                        on_step(step, x0, x, total)
            except BaseException as error:
                if isinstance(error, Refused) or not isinstance(error, ParallelError):  # `watch` or `on_step` raised it
                    self._cancel(waiting, message.job)
                raise
            answers = waiting.agreed()
            if self._kill_error is not None:  # its processes are ending, also where they have answered
                raise self._kill_error
        except Refused:
            raise
        except ParallelError as error:
            raise self._lose(error) from None
        return answers

    def _cancel(self, waiting: Waiting, job: int) -> None:
        """Stops the job on every rank. An error here ends the group, and the caller raises its own exception."""
        waiting.limits.cancelled = True
        self.activity.set_state("cancelling")
        try:
            self._processes.ask(Cancel(job))
            while not waiting.all_answered:
                for _ in waiting.listen():
                    pass
            self.activity.cancelled()
        except ParallelError as error:
            self._lose(error)

    def _lose(self, error: ParallelError) -> ParallelError:
        """Ends the group, and returns the error to raise."""
        if self._kill_error is None and self.activity.give_up_recording():
            error.sentence = say("reason.why", reason=error.sentence, why=say("died.recording"))
        self._error = self._error or self._kill_error or error
        self.activity.lost(self._error, intended=self._kill_error is not None)
        self.close()
        return self._error


def equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and not torch.is_tensor(a) and bool(a == b)


class SharedOutput:
    """A `tensor`, which outlives this, over the memory file `fd`, which does not. Raises OSError (ENOSPC)."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = prod(shape) * dtype.itemsize
        self.fd = empty_bundle(size)
        weakref.finalize(self, os.close, self.fd)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype).view(tuple(shape))

    def offset_of(self, part: Tensor) -> int | None:
        """Returns the offset of `part` in `tensor`, in elements; None if it is no contiguous part of it."""
        shared = self.tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        is_part = shared and part.is_contiguous() and part.dtype == self.tensor.dtype
        return int(part.storage_offset()) if is_part else None
