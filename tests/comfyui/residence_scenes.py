"""What ComfyUI, the page and the idle limit do to models in real workers at the same moment."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..groups import faulty, flux_job, wait_until, workers_of
from ..zoo.checkpoints import write
from .pack import node_module, pack_module

import comfy.model_management  # isort: skip  # the pack's module has made ComfyUI importable

lease, routes, memory, evaluation = (
    node_module(name) for name in ("remote.lease", "routes", "remote.comfy_memory", "remote.remote_model")
)
runtime = pack_module("parallel_runtime.group.runtime").runtime
run_plan = pack_module("parallel_runtime.planning.run_plan")
stats, plan_inputs = (pack_module(f"parallel_runtime.planning.{name}") for name in ("network_stats", "run_plan"))
specs, jobs = pack_module("parallel_runtime.specs"), pack_module("parallel_runtime.jobs")
request, readings = pack_module("parallel_runtime.request"), pack_module("parallel_runtime.wire.messages")

ONE = specs.Placement(devices=("cpu",))
MODELS = [specs.ModelSpec(loader=specs.DEMO, weight_dtype=dtype) for dtype in ("float32", "bfloat16")]
SLOW_SECONDS = 0.5
CLAIMED = 1 << 20  # bytes of weights, as the host has them


def unloaded_by_both(rank: int, world: int, times: int) -> list[dict[str, Any]]:
    """ComfyUI lets models go while /cp/free does: what the page hears, and whether the group lives, in each round."""
    return [_unloaded_by_both() for _ in range(times)]


def _unloaded_by_both() -> dict[str, Any]:
    group = _holding_models()
    with _slow(group), ThreadPoolExecutor() as threads:
        freed = threads.submit(routes._unload_models)
        native = threads.submit(comfy.model_management.unload_all_models)
        time.sleep(SLOW_SECONDS)
        os.kill(workers_of(group)[0], signal.SIGCONT)
        return {"freed": freed.result(), "native": native.result(), "alive": group.alive, "listed": _listed()}


def idle_while_unloading(rank: int, world: int) -> dict[str, Any]:
    """The group's idle time is over while ComfyUI lets a model go, in a run of its own."""
    runtime.idle_seconds = SLOW_SECONDS / 2
    try:
        group = _holding_models()
        with _slow(group), ThreadPoolExecutor() as threads:
            native = threads.submit(comfy.model_management.unload_all_models)
            time.sleep(2 * SLOW_SECONDS)
            alive = group.alive
            os.kill(workers_of(group)[0], signal.SIGCONT)
            error = native.exception()
        wait_until(lambda: runtime.status().state == "none" and runtime.status().reason != "", 10)
        return {"error": error and repr(error), "alive meanwhile": alive, "reason": runtime.status().reason}
    finally:
        runtime.idle_seconds = 0
        runtime.close()


def plans_of_a_run(rank: int, world: int, folder: str) -> dict[str, int]:
    """How often a plan is resolved: for a run, for a second evaluation of it, and for one of another size."""
    work = stats.NetworkStats(name="demo", heads=4, layers=2, width=64, weights=10, weight_bytes=20, item_bytes=4).work
    inputs = plan_inputs.PlanInputs(request=request.ParallelRequest(devices="cpu"), gpus=0, work=work(1, 64))
    spec, resolved, count = _model(Path(folder), "model"), [], lease.resolve
    setup, lease.comfy_setup = lease.comfy_setup, lambda **_: None
    lease.resolve = lambda known: resolved.append(known) or count(known)
    times: dict[str, int] = {}
    try:
        with lease.lease_with_plan(spec, inputs) as (taken, plan):
            taken.run(plan, jobs.DemoJob(**vars(flux_job())))
            loaded, times["run"] = taken.loaded, len(resolved)
        with lease.lease_with_plan(spec, inputs, previous=loaded, plan=plan) as (_, again):
            assert again is plan
            times["same size"] = len(resolved) - times["run"]
        with lease.lease_with_plan(spec, replace(inputs, work=work(1, 128)), previous=loaded) as (_, other):
            assert other.weights == plan.weights
            times["other size"] = len(resolved) - times["run"]
    finally:
        lease.resolve, lease.comfy_setup = count, setup
        runtime.close()
    return times


def unloading_a_group_that_is_replaced(rank: int, world: int) -> dict[str, Any]:
    """Whoever lets a model go waits for no group that is being started: the one that had the model is gone."""
    group = _holding_models()
    try:
        with ThreadPoolExecutor() as threads:
            threads.submit(runtime.restart, "a test", None)
            wait_until(lambda: runtime.live is None, 5)
            before = time.monotonic()
            comfy.model_management.unload_all_models()
            waited = time.monotonic() - before
            starting = runtime.live is None
        return {"waited": waited, "starting": starting, "alive": group.alive}
    finally:
        runtime.close()


def settled(rank: int, world: int) -> dict[str, Any]:
    """How many prompts' conditions the workers have of a model before a native sampler's run is over, and after."""
    group = _holding_models()
    try:
        run = evaluation.RemoteEvaluation(request.ParallelRequest())
        run._model = group.models[MODELS[0]]
        group.payloads._cond_arguments[MODELS[0]] = [(1, {})]
        before = len(group.payloads._cond_arguments)
        run.end()
        return {"before": before, "after": len(group.payloads._cond_arguments), "listed": len(group.models)}
    finally:
        runtime.close()


def main_memory(rank: int, world: int, times: int) -> list[int]:
    """What planning goes by, each time after the workers were asked; there is less of it at each."""
    runtime.close()
    os.environ |= faulty("0 main_memory dwindle")
    try:
        with runtime.borrowed(ONE, None) as group:
            return [group.measure() and memory.capacity_for(ONE, group, MODELS[0]).host_bytes for _ in range(times)]
    finally:
        del os.environ["CP_TEST_FAULT"]
        runtime.close()


def free_on_gpus_of_workers(rank: int, world: int) -> tuple[list[int], list[int | None]]:
    """What planning and a text encoder go by on GPUs that workers have, here where nobody can be asked for one."""
    two = specs.Placement(devices=("cuda:1", "cuda:2"))
    told = tuple(readings.Readings(used_bytes=0, total_bytes=24, free_bytes=free) for free in (20, 16))
    group: Any = SimpleNamespace(placement=two, readings=told, models={})
    return list(memory.capacity_for(two, group, MODELS[0]).ranks), memory.room_bytes(group, MODELS[0])


def room_on_a_gpu_of_workers(rank: int, world: int) -> list[Any]:
    """The models listed as loaded and their bytes, once two models of workers were loaded twice on a GPU, here where
    none can be; and whether ComfyUI asks for that GPU where it has a model of its own there."""
    loaded, gpu = comfy.model_management.current_loaded_models, specs.Placement(devices=("cuda:1",))
    group: Any = SimpleNamespace(placement=gpu, models={}, alive=True)
    before = list(loaded)
    first, second = (memory.GroupModel(group, spec, None, _plan().estimate).patchers[0] for spec in MODELS)
    try:
        for patcher in (first, second, first):
            memory.make_room(patcher, 0)
        listed = [one for one in loaded if one not in before]
        answer = [[one.model is patcher for one, patcher in zip(listed, (first, second), strict=True)]]
        answer.append([one.model_loaded_memory() for one in listed])
        own = memory.WeightlessPatcher(memory.WorkerModel(), torch.device("cuda:1"), memory.CPU, size=1)
        loaded.append(comfy.model_management.LoadedModel(own))
        loaded[-1].model_load()
        memory.make_room(second, 0)
    except (KeyError, RuntimeError, AssertionError):  # of torch.cuda, where there is none
        return [*answer, "asked"]
    else:
        return [*answer, "not asked"]
    finally:
        loaded[:] = before


def collected_while_unloading(rank: int, world: int) -> list[Any]:
    """What ComfyUI lists as loaded after "Unload models", in the middle of which Python collects its garbage: among it
    is a model that the workers had unloaded by themselves. Then whether it lists the model of a group that is there
    beside that of one that has ended."""

    class Collecting(memory.WeightlessPatcher):
        def detach(self, unpatch_all: bool = True) -> Any:
            gc.collect()
            return self.model

    comfy.model_management.unload_all_models()
    group: Any = SimpleNamespace(placement=ONE, models={}, alive=True)
    gone = group.models[MODELS[0]] = memory.GroupModel(group, MODELS[0], None, _plan().estimate)
    memory.make_room(gone.patchers[0], 0)
    own = [Collecting(memory.WorkerModel(), memory.CPU, memory.CPU, size=CLAIMED + size) for size in (1, 2, 3)]
    comfy.model_management.load_models_gpu(own)
    gone.mark_unloaded()
    del group.models[MODELS[0]], gone
    comfy.model_management.unload_all_models()
    left = _listed()
    ended, other = (SimpleNamespace(placement=ONE, models={}, alive=True) for _ in range(2))
    for group in (ended, other):
        model = group.models[MODELS[0]] = memory.GroupModel(group, MODELS[0], None, _plan().estimate)
        memory.make_room(model.patchers[0], 0)
        ended.alive = False
    listed = [one.model.group_model.group is other for one in comfy.model_management.current_loaded_models]
    other.models.clear()
    return [*left, *listed]


def recordings_go_first(rank: int, world: int, folder: str) -> dict[str, Any]:
    """ComfyUI wants a part of a model; then a limit has no place for one model beside the other's recordings."""
    runtime.close()
    os.environ |= faulty("tape")
    try:
        with runtime.borrowed(ONE, None) as group:
            first, _ = (_recorded(group, Path(folder), name) for name in ("high", "low"))
            before = _reported(group)
            model = group.models[first.unpatched]
            (loaded,) = (one for one in comfy.model_management.current_loaded_models if one.model in model.patchers)
            unloaded = loaded.model_unload(1000)
            after = _reported(group)
            needed = CLAIMED + after["low"]["resident"] + after["low"]["recorded"] // 2
            os.environ[memory.LIMIT] = str(needed / 2**30)
            lack = lease.Lease(group, first).claim(_plan(), limited=True)
            last = _reported(group)
        return {"before": before, "unloaded": unloaded, "after": after, "lack": lack and str(lack), "last": last}
    finally:
        for name in ("CP_TEST_FAULT", memory.LIMIT):
            os.environ.pop(name, None)
        runtime.close()


def _recorded(group: Any, folder: Path, name: str) -> Any:
    """A model in the workers that has sampled, and been recorded."""
    spec = _model(folder, name)
    lease.Lease(group, spec).claim(_plan())
    group.run(spec, specs.Parallelism(), jobs.DemoJob(**vars(flux_job())))
    return spec


def _model(folder: Path, name: str) -> Any:
    path = write(folder, "flux_schnell").rename(folder / name)
    stat = path.stat()
    file = specs.SourceFile(path=str(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns)
    return specs.ModelSpec(loader=specs.DEMO, files=(file,))


def _plan() -> Any:
    none = {"activation_bytes_by_rank": (0,), "buffer_bytes_by_rank": (0,)}
    needed = run_plan.Estimate(weight_bytes_by_rank=(CLAIMED,), **none)
    return run_plan.RunPlan(degrees=specs.Parallelism(), placement=ONE, estimate=needed)


def _reported(group: Any) -> dict[str, dict[str, int]]:
    (readings,) = group.measure()
    return {one.model: {"resident": one.resident, "recorded": one.recorded} for one in readings.weights}


def _holding_models() -> Any:
    comfy.model_management.unload_all_models()
    with runtime.borrowed(ONE, None) as group:
        for model in MODELS:
            lease.Lease(group, model).claim(_plan())
    assert _listed() == ["WorkerModel"] * len(MODELS)
    return group


def _listed() -> list[str]:
    return [type(loaded.model.model).__name__ for loaded in comfy.model_management.current_loaded_models]


@contextmanager
def _slow(group: Any) -> Iterator[None]:
    """A worker that answers nothing until it is let go on."""
    (pid,) = workers_of(group)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class _Group:
    """A group of four GPUs, as ComfyUI's process sees it: what each rank has of one model, in its readings."""

    alive, in_run = True, False
    placement = specs.Placement(devices=tuple(f"cuda:{number}" for number in range(4)))

    def __init__(self, size: int) -> None:
        self.models: dict[Any, Any] = {}
        self.resident = [size] * 4
        self.asked: list[Any] = []

    @property
    def readings(self) -> list[Any]:
        return [
            readings.Readings(0, 0, (readings.ModelMemory("", size, fingerprint=MODELS[0].fingerprint),))
            for size in self.resident
        ]

    def give_back(self, model: Any, ranks: Any, nbytes: int) -> None:
        self.asked.append(("give back", *ranks))
        for rank in ranks:
            self.resident[rank] -= min(self.resident[rank], -(-nbytes // 1000) * 1000)  # whole layers

    def free(self, model: Any, after: str) -> None:
        self.asked.append(after)
        self.resident = [0] * 4

    def close(self) -> None:
        pass


def encoder_on_one_gpu(rank: int, world: int, mode: str) -> dict[str, Any]:
    """ComfyUI needs a part of GPU 0, then all of it, then of every GPU: what ranks have then, and what it counts."""
    runtime.close()
    none = {"activation_bytes_by_rank": (0,) * 4, "buffer_bytes_by_rank": (0,) * 4}
    needed = run_plan.Estimate(weight_bytes_by_rank=(12_000,) * 4, **none)
    runtime.group = group = _Group(12_000)
    weights = specs.WeightPlacement(mode=mode)
    model = group.models[MODELS[0]] = memory.GroupModel(group, MODELS[0], weights, needed)
    loaded = [comfy.model_management.LoadedModel(patcher) for patcher in model.patchers]
    try:
        for one in loaded:
            one.model_load()
        answers = {"part stays": not loaded[0].model_unload(3_500), "after a part": list(group.resident)}
        answers["counted"] = [one.model_loaded_memory() for one in loaded]
        loaded[0].model_load()
        answers["counted again"] = loaded[0].model_loaded_memory()
        answers |= {"gone": loaded[0].model_unload(1 << 40), "after all": list(group.resident)}
        answers |= {"listed": len(group.models), "counted then": [one.model_loaded_memory() for one in loaded]}
        for one in loaded[1:]:
            one.model_unload(1 << 40)
        return answers | {"listed at last": len(group.models), "asked": group.asked}
    finally:
        runtime.group = None


def plans_after_memory_ran_out(rank: int, world: int, folder: str) -> dict[str, Any]:
    """What a plan counts for a worker, and its entries at once: after one dies for lack of memory, of the next run
    of this size, of another size, and where nothing fits into less."""
    runtime.close()
    network = stats.NetworkStats(name="demo", heads=4, layers=2, width=64, weights=10, weight_bytes=20, item_bytes=4)
    inputs = plan_inputs.PlanInputs(
        request=request.ParallelRequest(devices="cpu"), gpus=0, work=network.work(1, 640, prompts=2), guided=True
    )
    spec, setup, lease.comfy_setup = _model(Path(folder), "model"), lease.comfy_setup, lambda **_: None

    def planned(known: Any) -> tuple[int, int]:
        plan = lease.dry_run(spec, known).plan
        return max(plan.estimate.needed_bytes_by_rank), plan.entries_per_call

    os.environ |= faulty("0 forward exhaust")
    try:
        with suppress(lease.WorkerFailed), lease.lease_with_plan(spec, inputs) as (taken, plan):
            taken.run(plan, jobs.DemoJob(**vars(flux_job())))
        found: dict[str, Any] = {"too many": list(runtime.bytes_too_many.values()), "next": planned(inputs)}
        found["other"] = planned(replace(inputs, work=network.work(1, 641, prompts=2)))
        runtime.bytes_too_many = dict.fromkeys(runtime.bytes_too_many, 1)
        return found | {"nothing fits": planned(inputs)}
    finally:
        os.environ.pop("CP_TEST_FAULT", None)
        lease.comfy_setup, runtime.bytes_too_many = setup, {}
        runtime.close()
