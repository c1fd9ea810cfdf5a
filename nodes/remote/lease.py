"""A run's exclusive lease of the workers: a plan, memory for it, and every request that the workers get."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from threading import Event, Lock
from typing import Any

import comfy.utils
import torch
from comfy import model_management
from comfy.model_management import throw_exception_if_processing_interrupted as check_interrupt
from comfy_execution.utils import get_executing_context

from ...parallel_runtime.errors import ParallelError, Refused, WorkerDied, WorkerFailed, WorkerLost, say
from ...parallel_runtime.explain.plan_words import compared, why_replicated
from ...parallel_runtime.group import history, launch
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.group.worker_group import OnStep, Result, Watch, WorkerGroup
from ...parallel_runtime.jobs import Job
from ...parallel_runtime.planning import candidates, memory_model, network_stats, seconds
from ...parallel_runtime.planning.resolve import alternatives, best_plan, resolve, why_unfit
from ...parallel_runtime.planning.run_plan import Estimate, PlanInputs, RunPlan
from ...parallel_runtime.request import AfterSampling, ParallelRequest, are_automatic
from ...parallel_runtime.specs import ModelSpec, Placement
from ..describe.host import comfy_setup
from .comfy_memory import LIMIT, GroupModel, capacity_for, make_room, sum_by_device, user_limits

log = logging.getLogger(__name__)

KINDS_PER_DOUBLING = 8  # kinds of runs for each doubling of the tokens: a smaller difference is the same kind
LESS = 0.9  # of the bytes that a plan counted for a worker is the next plan's limit once the worker ran out of memory
_in_thread = Lock()  # held while a lease is `taken_over`
ALL_BYTES = 1e30  # ComfyUI's number for unloading everything
KEEP_MODELS = 2  # models at once in the workers, memory permitting: Wan 2.2 samples one video with two


@contextmanager
def lease_workers(
    spec: ModelSpec, placement: Placement, after: AfterSampling = "keep", *, work: history.LeasedFor = "sampling"
) -> Iterator[Lease]:
    """Leases the workers of `placement`, exclusively, for this work, which the history records. `after`: keeps,
    offloads or unloads the model at the end. Raises WorkerStartError."""
    setup = comfy_setup(compiles=spec.compilation is not None)
    with _recorded(spec, work), runtime.borrowed(placement, setup, check_interrupt) as group:
        lease = Lease(group, spec)
        with lease.ended(after):
            yield lease


@contextmanager
def leased_if_idle(spec: ModelSpec, placement: Placement) -> Iterator[Lease | None]:
    """Leases the workers of `placement` for what is to run on another thread, which takes the lease over; None where
    they have not started, or are in use."""
    with runtime.idle_group() as group:
        setup = comfy_setup(compiles=spec.compilation is not None)
        if group is None or (group.placement, group.comfy) != (placement, setup):
            yield None
            return
        with runtime.borrowed(placement, setup, check_interrupt) as group:
            yield Lease(group, spec)


@contextmanager
def taken_over(lease: Lease, prompt: str, after: AfterSampling, begun: Event) -> Iterator[None]:
    """Leases the same workers on this thread, for texts that `prompt` will ask for; `begun` is set once no other thread
    can have them before. Raises WorkerDied where they have ended."""
    with (
        _in_thread,
        runtime.exclusive(lease.group) as group,
        runtime.recorded("prompt", prompt, lease.spec.title),
        lease.ended(after),
    ):
        begun.set()
        if group is None:
            raise WorkerDied(say("died.ended"))
        yield


def _recorded(spec: ModelSpec, work: history.LeasedFor, *, goes_on: bool = False) -> AbstractContextManager[None]:
    """Returns the record of this work, which begins once that of a lease `taken_over` has ended."""
    while not _in_thread.acquire(timeout=launch.POLL_SECONDS):
        check_interrupt()
    _in_thread.release()
    context, title = get_executing_context(), spec.title if work in ("sampling", "prompt") else ""
    return runtime.recorded(work, context.prompt_id if context is not None else None, title, goes_on=goes_on)


@contextmanager
def lease_with_plan(
    spec: ModelSpec,
    inputs: PlanInputs,
    after: AfterSampling = "keep",
    *,
    previous: GroupModel | None = None,
    plan: RunPlan | None = None,
    goes_on: bool = False,
) -> Iterator[tuple[Lease, RunPlan]]:
    """Leases the workers of a run, with its plan, which is resolved once, when sizes and memory are known. Without
    `devices` in the request all devices start once, and slow ones are left out from then on. `previous` is the model
    at the last evaluation of the same run, and `plan` its plan where the sizes are the same: both stay if the workers
    still have the model. `goes_on`: the history's record goes on until `runtime.end_evaluations`. Raises Refused, with
    the numbers, before a worker takes memory; WorkerStartError."""
    first = previous.group.placement if previous is not None else _initial_placement(inputs)
    with _recorded(spec, "sampling", goes_on=goes_on):
        with lease_workers(spec, first, after) as lease:
            known, plan = lease.plan(inputs, previous, plan)
            if plan.placement == first:
                yield lease, plan if lease.is_current(previous) else lease.fit(known, plan)
                return
        with lease_workers(spec, plan.placement, after) as lease:
            yield lease, lease.fit(known, plan)


def _initial_placement(inputs: PlanInputs) -> Placement:
    """Returns the workers to measure first: the live ones if allowed, else all or the last used."""
    all_devices, live = candidates.default_plan(inputs).placement, runtime.live
    if not inputs.may_leave_devices or all_devices not in runtime.profiles:
        return all_devices
    if live is not None and live.placement.nnodes == 1 and set(live.placement.devices) <= set(all_devices.devices):
        return live.placement if not live.placement.shared else all_devices
    return runtime.last_auto_placement.get(all_devices, all_devices)


def dry_run(spec: ModelSpec, inputs: PlanInputs) -> DryRun:
    """Returns the plan that a run would get at this moment. Raises Refused for a request invalid at any size."""
    devices = candidates.default_plan(inputs).placement.devices
    with runtime.idle_group() as group, suppress(ParallelError):
        if group is not None and set(group.placement.devices) <= set(devices):
            group.measure()
    live = runtime.live
    known = _with_measurements(spec, inputs, live)
    plan = best_plan(known)
    refused = why_unfit(known, plan)
    others = () if refused else alternatives(known, plan)
    plan = replace(plan, estimate=None) if refused else plan
    group = live if live is not None and live.placement == plan.placement else None
    return DryRun(inputs=known, plan=plan, group=group, compared=compared((plan, *others)), refused=refused)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The plan that a run would get, the inputs that it was resolved from, and its live workers, if any. `compared`:
    sentences on other plans. `refused`: the shortage of memory, if any; the plan has no estimate then."""

    inputs: PlanInputs
    plan: RunPlan
    group: WorkerGroup | None
    compared: Sequence[str]
    refused: Refused | None


def _with_measurements(spec: ModelSpec, inputs: PlanInputs, group: WorkerGroup | None) -> PlanInputs:
    """Returns `inputs` with the devices' measurements and the weights that the live `group` has loaded."""
    all_devices = candidates.default_plan(inputs).placement
    loaded = group.models.get(spec.unpatched) if group is not None else None
    known = replace(
        inputs,
        profile=runtime.profiles.get(all_devices),
        profiles=runtime.profiles,
        capacity=capacity_for(all_devices, group, spec),
        live=group.placement if group is not None else None,
        shares=group.balance.shares(spec) if group is not None else {},
        before=loaded.weights if loaded is not None else None,
    )
    if (limit := runtime.bytes_too_many.get(_size_of(spec, inputs))) is None:
        return known
    workers = all_devices.world_size
    less = replace(known, capacity=known.capacity.at_most(limit, range(workers), workers))
    return known if why_unfit(less, best_plan(less)) else less  # memory may be free now where nothing fits into less


def _size_of(spec: ModelSpec, inputs: PlanInputs) -> tuple[object, ...]:
    work = inputs.work
    return spec.unpatched, *((work.tokens, work.sequences, work.prompts) if work is not None else ())


@dataclass(eq=False)
class Lease:
    """The lease of one group's workers, for requests of one model or VAE."""

    group: WorkerGroup
    spec: ModelSpec
    _size: tuple[object, ...] = ()

    @contextmanager
    def ended(self, after: AfterSampling) -> Iterator[None]:
        """Keeps, offloads or unloads the model at the end of this context, and says what follows a worker's death."""
        try:
            yield
        except WorkerLost as lost:
            lost.sentence = say("reason.why", reason=lost.sentence, why=say("died.next"))
            raise
        finally:
            if self.loaded is not None and after != "keep":
                self.loaded.free(after)

    @property
    def loaded(self) -> GroupModel | None:
        """Returns the model in the group's list; None where it is not listed."""
        return self.group.models.get(self.spec.unpatched)

    def is_current(self, previous: GroupModel | None) -> bool:
        """Do the workers still have `previous`, with these weight patches?"""
        return previous is not None and previous is self.loaded and self.group.payloads.has_model(self.spec)

    def budget_bytes(self) -> tuple[int | None, ...]:
        """Returns the bytes of its device that each worker may take at this moment; None where that is unknown."""
        placement = self.group.placement
        return capacity_for(placement, self.group, self.spec).budget_bytes(placement.world_size)

    def plan(self, inputs: PlanInputs, previous: GroupModel | None, plan: RunPlan | None) -> tuple[PlanInputs, RunPlan]:
        """Returns `plan` if the workers still have the `previous` model, else one that is resolved with their memory at
        this moment; with its inputs. Raises Refused."""
        self._size = _size_of(self.spec, inputs)
        current, only = self.is_current(previous), self.group.placement if previous is not None else None
        if plan is not None and current:
            return inputs, plan
        known = replace(_with_measurements(self.spec, inputs, self.group), only=only, keeps_placement=current)
        plan = resolve(known)
        if inputs.may_leave_devices and not current:
            runtime.last_auto_placement[candidates.default_plan(inputs).placement] = plan.placement
        return known, plan

    def run(
        self,
        plan: RunPlan,
        job: Job,
        *,
        output: int | None = None,
        on_step: OnStep = lambda *_: None,
        watch: Watch = check_interrupt,
    ) -> Result:
        unrecordable = self.group.activity.unrecordable
        was_recordable = self.spec.unpatched not in unrecordable
        watched: dict[str, Any] = {"on_step": on_step, "watch": watch}
        try:
            return self.group.run(self.spec, plan.degrees, job, weight_placement=plan.weights, output=output, **watched)
        except WorkerFailed as failed:
            log.error("[CP] rank %d:\n%s", failed.cause.rank, failed.traceback)
            recorded = was_recordable and self.spec.unpatched in unrecordable  # too much: that is not done again
            if failed.cause.kind == "out_of_memory" and plan.estimate is not None and not recorded:
                limit = int(LESS * max(plan.estimate.needed_bytes_by_rank))
                runtime.bytes_too_many[self._size] = limit
                log.info(
                    "[CP] the next run of this size takes at most %.1f GiB of each device", limit / memory_model.GIB
                )
            raise
        finally:
            for model in [model for model in self.group.models.values() if model.unload_after_run]:
                model.free()

    def claim(self, plan: RunPlan, *, limited: bool = False) -> memory_model.Shortage | None:
        """Has ComfyUI free memory on every device for weights and workspace. Returns the shortage that remains after it
        has unloaded all it can. CUDA graphs go first: other models' are evicted where memory is missing, and this
        model's count as workspace. `limited`: the user's CP_MEMORY_GIB counts too."""
        assert plan.estimate is not None
        needed, placement, models, key = plan.estimate, self.group.placement, self.group.models, self.spec.unpatched
        model = models.pop(key, None)
        if model is not None and model.needed.weight_bytes_by_rank != needed.weight_bytes_by_rank:
            model.mark_unloaded()
            model = None
        model = model or GroupModel(self.group, key, plan.weights, needed)
        model.weights, model.needed = plan.weights, needed
        alike = [other for other in models.values() if other.spec.part == key.part]
        for oldest in alike[: -(KEEP_MODELS - 1)]:
            oldest.free()
        models[key] = model  # as the last one used
        limits, workspace = user_limits(placement.world_size) if limited else (), needed.workspace_bytes_by_rank
        model_management.soft_empty_cache()  # ComfyUI counts its cache as free, but workers cannot have it
        fingerprint = self.spec.fingerprint
        others_have_graphs = any(one.graphs.bytes > one.recorded_bytes(fingerprint) for one in self.group.readings)
        if others_have_graphs and self._find_shortage(needed, limits):
            for other in [other for other in models.values() if other is not model]:
                other.evict_graphs()
        graph_bytes = [reading.recorded_bytes(fingerprint) for reading in self.group.readings]
        each = zip(workspace, graph_bytes or [0] * len(workspace), strict=True)
        workspace = [max(0, size - recorded) for size, recorded in each]
        for patcher, size in zip(model.patchers, sum_by_device(placement, workspace).values(), strict=True):
            make_room(patcher, size)
        if not self.spec.kind and not self.spec.text_encoder:
            self.group.connect(plan.degrees, sharded=plan.sharded, watch=check_interrupt)
        if placement.devices[0] == "cpu" and not limits:
            return None
        if lack := self._find_shortage(needed, limits):
            log.info("[CP] %s; ComfyUI unloads its models", lack)
            loaded = model_management.current_loaded_models
            keep = [one for one in loaded if any(one.model is patcher for patcher in model.patchers)]
            for device in dict.fromkeys(placement.devices):
                model_management.free_memory(ALL_BYTES, torch.device(device), keep)
            gc.collect()
            model_management.soft_empty_cache()
            lack = self._find_shortage(needed, limits)
        return lack

    def _find_shortage(self, needed: Estimate, limits: Sequence[int]) -> memory_model.Shortage | None:
        readings, placement = self.group.measure(check_interrupt), self.group.placement
        of_each, each = limits or (None,) * placement.world_size, needed.needed_bytes_by_rank
        return memory_model.shortage(placement, readings, self.spec.fingerprint, each, limits=of_each, limited_by=LIMIT)

    def fit(self, inputs: PlanInputs, plan: RunPlan) -> RunPlan:
        """Claims memory for the plan and returns it. Where ComfyUI cannot free as much as the plan counted on, weights
        auto resolves another plan, which is returned instead. Raises Refused."""
        self._size = _size_of(self.spec, inputs)
        auto, name = inputs.request.weights == "auto", inputs.work.network.name if inputs.work else ""
        lack = self.claim(plan, limited=auto)
        try:
            for _ in self.group.placement.devices if auto else ():
                if lack is None:
                    break
                ranks = [plan.ranks[rank] for rank in lack.ranks] if plan.ranks else lack.ranks
                workers = candidates.default_plan(inputs).placement.world_size
                capacity = inputs.capacity.at_most(lack.each, ranks, workers)
                inputs = replace(inputs, capacity=capacity, only=plan.placement)
                plan = resolve(inputs)
                lack = self.claim(plan, limited=auto)
            if lack is not None:
                raise Refused("memory.taken", widget="weights", network=name, lack=lack.sentence)
        except Refused:
            if self.loaded is not None:
                self.loaded.free()
            raise
        work, profile = inputs.work, inputs.profile_of(plan)
        assert work is not None
        split = work.network.divisible and plan.degrees.pipeline_degree == 1 and not plan.placement.shared
        known = split and profile is not None and profile.bytes_per_second
        speedup = seconds.times_as_fast(work, plan.degrees, profile) if known and profile is not None else None
        self.group.activity.history.size = history.Size(run_kind(self.spec, work, inputs.request), speedup, work.tokens)
        if are_automatic(inputs.request.shares):
            self.group.balance.begin(self.spec, plan.degrees)
        if inputs.gpus == 1 == plan.placement.world_size:
            _log_one_gpu()
        if why := why_replicated(inputs.request, plan, work.network):
            log.info("[CP] %s", why.removesuffix("."))
        if plan.entries_per_call:
            prompts = work.prompts_per_rank(plan.degrees)
            log.info("[CP] prompts run one after the other: memory is too small for %d at once", prompts)
        return plan


def progress_bar() -> OnStep:
    """Returns an `on_step` that shows a job's steps in ComfyUI's progress bar."""
    bar: comfy.utils.ProgressBar | None = None

    def on_step(done: int, x0: Any, x: Any, total: int) -> None:
        nonlocal bar
        bar = bar or comfy.utils.ProgressBar(total)
        bar.update_absolute(done, total)

    return on_step


def run_kind(spec: ModelSpec, work: network_stats.Work, request: ParallelRequest) -> tuple[object, ...]:
    """Returns a key of runs that take equally long on the same workers; a few text tokens more count nothing."""
    tokens, options = round(KINDS_PER_DOUBLING * math.log2(max(1, work.tokens))), request.options
    chosen = options.step_cache, options.attention_backend, options.cuda_graphs, request.weights
    network = spec.unpatched, spec.compute_dtype, spec.compilation, work.network.weight_bytes
    return *network, work.sequences, work.prompts, tokens, *chosen


@cache
def _log_one_gpu() -> None:
    log.info("[CP] one GPU: the same result as KSampler; to split a picture you need two")
