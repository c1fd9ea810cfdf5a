"""What ComfyUI, the page and the idle limit do to models in real workers at the same moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from ..groups import faulty, wait_until, workers_of
from .pack import node_module, pack_module

import comfy.model_management  # isort: skip  # the pack's module has made ComfyUI importable

lease, routes, capacity = (node_module(name) for name in ("lease", "routes", "capacity"))
runtime, storing = pack_module("parallel_runtime.host.runtime").runtime, pack_module("parallel_runtime.host.storing")
specs = pack_module("parallel_runtime.specs")

ONE = specs.Placement(devices=("cpu",))
MODELS = [specs.ModelSpec(loader=specs.DEMO, weight_dtype=dtype) for dtype in ("float32", "bfloat16")]
SLOW_SECONDS = 0.5


def unloaded_by_both(rank: int, world: int, times: int) -> list[dict[str, Any]]:
    """ComfyUI lets models go while /cp/free does: what the page hears, and whether the group lives, in each round."""
    return [_unloaded_by_both() for _ in range(times)]


def _unloaded_by_both() -> dict[str, Any]:
    group = _holding_models()
    with _slow(group), ThreadPoolExecutor() as threads:
        freed = threads.submit(routes._free)
        native = threads.submit(comfy.model_management.unload_all_models)
        time.sleep(SLOW_SECONDS)
        os.kill(workers_of(group)[0], signal.SIGCONT)
        return {"freed": freed.result(), "native": native.result(), "alive": group.alive, "listed": _listed()}


def idle_while_unloading(rank: int, world: int) -> dict[str, Any]:
    """The group's idle time is over while ComfyUI lets a model go, in a run of its own."""
    runtime.idle.choose(SLOW_SECONDS / 2)
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
        runtime.idle.choose(None)
        runtime.close()


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


def main_memory(rank: int, world: int, times: int) -> list[int]:
    """What planning goes by, each time after the workers were asked; there is less of it at each."""
    runtime.close()
    os.environ |= faulty("0 main_memory dwindle")
    try:
        with runtime.borrowed(ONE, None) as group:
            return [group.measure() and capacity.capacity_for(ONE, group, MODELS[0]).host_bytes for _ in range(times)]
    finally:
        del os.environ["CP_TEST_FAULT"]
        runtime.close()


def _holding_models() -> Any:
    comfy.model_management.unload_all_models()
    with runtime.borrowed(ONE, None) as group:
        way = storing.Prospect(storage=specs.Storage(), held=(1 << 20,))
        for model in MODELS:
            lease.Lease(group, model).claim(way, (0,))
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
