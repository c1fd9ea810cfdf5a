"""Workers start while ComfyUI still encodes text: as soon as a prompt with a CP node has been running for a moment."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from server import PromptServer

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.planning import plan
from ..parallel_runtime.host.runtime import start_ahead
from ..parallel_runtime.specs import ParallelRequest
from .settings import refresh
from .workers import comfy_setup, gpu_kind, visible_gpus

CP_NODES = {"CPSampler", "CPSamplerAdvanced", "CPSamplerCustom", "CPLoadDiffusionModel"}
WAIT_SECONDS = 2.0  # what is refused or cached is over by then, and needs no workers
ANY_HEADS = 5040  # divides well: devices are known before the model is

KINDS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}  # of JSON

Prompt = dict[str, dict[str, Any]]


def on_prompt(queued: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's on-prompt handler; hands on what it got."""
    prompt = queued.get("prompt") or {}
    request = requested(prompt)
    if request is not None:
        timer = threading.Timer(WAIT_SECONDS, _start, [prompt, request])
        timer.daemon = True
        timer.start()
    return queued


def requested(prompt: Prompt) -> ParallelRequest | None:
    """What the first CP node in `prompt` asks for, where that can be read from it."""
    for node in prompt.values():
        if isinstance(node, dict) and node.get("class_type") in CP_NODES:
            link = node.get("inputs", {}).get("cp_config")
            return refresh().request if link is None else _configured(prompt, link)
    return None


def _configured(prompt: Prompt, link: Any) -> ParallelRequest | None:
    source = prompt.get(str(link[0]), {}) if isinstance(link, list) and link else {}
    values = source.get("inputs", {})
    if source.get("class_type") != "CPParallelConfig" or any(isinstance(value, list) for value in values.values()):
        return None
    usual = vars(ParallelRequest())
    known = {name: values[name] for name in values.keys() & usual.keys()}
    if any(not isinstance(value, KINDS[type(usual[name])]) for name, value in known.items()):
        return None
    request = ParallelRequest(**known)
    of_heads = request.ring_degree and not request.ulysses_degree  # how many workers depends on the model
    return None if of_heads or request.nnodes != 1 else request


def _start(prompt: Prompt, request: ParallelRequest) -> None:
    running, waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    if any(task[2] == prompt for task in (*running, *waiting)):
        with contextlib.suppress(Refused):  # the node will say it
            division = plan(request, heads=ANY_HEADS, gpus=visible_gpus(), kind=gpu_kind())
            start_ahead(division.placement, comfy_setup())
