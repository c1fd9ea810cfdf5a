"""Workers start while ComfyUI still encodes text: as soon as a prompt with a CP node has been running for a moment."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from server import PromptServer

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.migrate import STANDS_IN
from ..parallel_runtime.specs import ParallelRequest
from .config import requested
from .workers import comfy_setup, plan_any, usual_for

CP_NODES = {*STANDS_IN.values(), "CPLoadDiffusionModel"}
WAIT_SECONDS = 2.0  # what is refused or cached is over by then, and needs no workers
Prompt = dict[str, dict[str, Any]]


def on_prompt(queued: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's on-prompt handler; hands on what it got."""
    prompt = queued.get("prompt") or {}
    request = asked_in(prompt)
    if request is not None:
        timer = threading.Timer(WAIT_SECONDS, _start, [prompt, request])
        timer.daemon = True
        timer.start()
    return queued


def asked_in(prompt: Prompt) -> ParallelRequest | None:
    """What the first CP node in `prompt` asks for, where that can be read from it."""
    for node in prompt.values():
        if isinstance(node, dict) and node.get("class_type") in CP_NODES:
            link = node.get("inputs", {}).get("cp_config")
            return requested(None) if link is None else _configured(prompt, link)
    return None


def _configured(prompt: Prompt, link: Any) -> ParallelRequest | None:
    source = prompt.get(str(link[0]), {}) if isinstance(link, list) and link else {}
    if source.get("class_type") != "CPParallelConfig":
        return None
    with contextlib.suppress(Refused):  # also what comes from other nodes
        request = ParallelRequest.of(source.get("inputs"))
        return None if request.by_heads or request.nnodes != 1 else request
    return None


def _start(prompt: Prompt, request: ParallelRequest) -> None:
    running, waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    if any(task[2] == prompt for task in (*running, *waiting)):
        with contextlib.suppress(Refused):  # the node will say it
            runtime.start_ahead(usual_for(request, plan_any(request).placement), comfy_setup())
