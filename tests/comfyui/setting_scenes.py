"""What the environment and the saved settings do to nodes without a CP Parallel Config, and to the panel's Stop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from ..groups import Stop
from .pack import node_module, pack_module

settings, routes = node_module("describe.host"), node_module("routes")
local, vae = node_module("describe.host"), node_module("remote.remote_vae")
runtime = pack_module("parallel_runtime.group.runtime").runtime
Placement = pack_module("parallel_runtime.specs").Placement


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    settings._apply.cache_clear()
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        settings._apply.cache_clear()
        settings.refresh()


def chosen(rank: int, world: int, name: str, saved: Any, variables: dict[str, str]) -> list[Any]:
    """The value of a setting that is saved and in the environment, and the warnings in the log."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    settings.log.addHandler(handler)
    try:
        with _environment(variables):
            return [getattr(settings.Settings.of({f"CPSampler.{name}": saved}), name), warned]
    finally:
        settings.log.removeHandler(handler)


def default_devices(rank: int, world: int, devices: str) -> list[list[str]]:
    """The devices of a sampler and of a VAE, both without a CP Parallel Config."""
    runtime.close()  # a VAE takes workers that are there
    with _environment({"CP_DEVICES": devices}):
        sampler = local.plan_without_model(settings.request_from(None)).placement
        return [list(sampler.devices), list(vae.placement_for(None).devices)]


def stopped_while_workers_start(rank: int, world: int, awaited: bool) -> list[Any]:
    """The answer of /cp/stop while a prompt runs that awaits the workers or does not, and whether it is interrupted."""
    queue = SimpleNamespace(get_current_queue_volatile=lambda: ([(0, "id", {}, {}, [])], []))
    server, routes.PromptServer = routes.PromptServer, SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue))
    memory = routes.comfy.model_management
    runtime._activity.starting(Placement(devices=("cpu", "cpu")))
    try:
        stop = _awaiting(routes.stop) if awaited else asyncio.run(routes.stop(None))
        return [stop.status, memory.processing_interrupted()]
    finally:
        runtime._activity.ended()
        memory.interrupt_current_processing(False)
        routes.PromptServer = server


def _awaiting(route: Any) -> Any:
    """Returns the answer of a route to a page that asks while a run waits for the thread that starts the workers."""
    held, answered = threading.Event(), threading.Event()
    answers: list[Any] = []

    def start() -> None:
        with runtime._locked():
            held.set()
            answered.wait(20)

    def watch() -> None:
        answers.append(asyncio.run(route(None)))
        raise Stop

    starting = threading.Thread(target=start)
    starting.start()
    held.wait(20)
    with suppress(Stop), runtime.borrowed(Placement(devices=("cpu",)), None, watch):
        pass
    answered.set()
    starting.join()
    return answers[0]
