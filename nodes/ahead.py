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
from .remote import comfy_setup, visible_gpus

CP_NODES = {"CPSampler", "CPSamplerAdvanced", "CPSamplerCustom", "CPLoadDiffusionModel"}
WAIT_SECONDS = 2.0  # what is refused or cached is over by then, and needs no workers
ANY_HEADS = 5040  # divides well: devices are known before the model is

Prompt = dict[str, dict[str, Any]]


def on_prompt(queued: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's on-prompt handler; hands on what it got."""
    request = requested(queued.get("prompt") or {})
    if request is not None:
        timer = threading.Timer(WAIT_SECONDS, _start, [request])
        timer.daemon = True
        timer.start()
    return queued


def requested(prompt: Prompt) -> ParallelRequest | None:
    """What the first CP node in `prompt` asks for, where that can be read from it."""
    for node in prompt.values():
        if isinstance(node, dict) and node.get("class_type") in CP_NODES:
            link = node.get("inputs", {}).get("cp_config")
            return ParallelRequest() if link is None else _configured(prompt, link)
    return None


def _configured(prompt: Prompt, link: Any) -> ParallelRequest | None:
    source = prompt.get(str(link[0]), {}) if isinstance(link, list) and link else {}
    values = source.get("inputs", {})
    if source.get("class_type") != "CPParallelConfig" or any(isinstance(value, list) for value in values.values()):
        return None
    known = values.keys() & ParallelRequest.__dataclass_fields__.keys()
    request = ParallelRequest(**{name: values[name] for name in known})
    of_heads = request.ring_degree and not request.ulysses_degree  # how many workers depends on the model
    return None if of_heads or request.nnodes != 1 else request


def _start(request: ParallelRequest) -> None:
    if PromptServer.instance.prompt_queue.get_tasks_remaining():
        with contextlib.suppress(Refused, TypeError):  # the node will say it
            _, placement = plan(request, heads=ANY_HEADS, gpus=visible_gpus())
            start_ahead(placement, comfy_setup())
