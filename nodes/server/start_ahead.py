"""Starts the workers before a node asks for them: with ComfyUI, if the user has set that, and while ComfyUI still
encodes text, once a prompt with a CP node has run for WAIT_SECONDS."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from server import PromptServer

from ...parallel_runtime.commands.migrate import REPLACEMENTS
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.request import ParallelRequest
from ..describe.host import comfy_setup, last_used, plan_without_model
from .settings import refresh, request_from

log = logging.getLogger(__name__)

CP_NODES = {*REPLACEMENTS.values(), "CPLoadDiffusionModel", "CPModel"}
WAIT_SECONDS = 2.0  # a prompt that is refused or cached is over by then
Prompt = dict[str, dict[str, Any]]


def start_with_comfyui() -> None:
    """Starts the workers of a node without a CP Parallel Config on another thread, if that is set."""
    settings = refresh()
    if not settings.StartWithComfyUI:
        return
    try:
        runtime.start_ahead(plan_without_model(settings.request).placement, comfy_setup(), queued=False)
    except Refused as refused:
        log.warning("[CP] no workers started with ComfyUI: %s", refused)


def on_prompt(queued: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's on-prompt handler; returns the prompt as it is."""
    prompt = queued.get("prompt") or {}
    request = request_in(prompt)
    if request is not None:
        timer = threading.Timer(WAIT_SECONDS, _start, [prompt, request])
        timer.daemon = True
        timer.start()
    return queued


def request_in(prompt: Prompt) -> ParallelRequest | None:
    """Returns the request of the first CP node in `prompt`; None where the prompt does not show it."""
    for node in prompt.values():
        if isinstance(node, dict) and node.get("class_type") in CP_NODES:
            link = node.get("inputs", {}).get("cp_config")
            return request_from(None) if link is None else _request_of_link(prompt, link)
    return None


def _request_of_link(prompt: Prompt, link: Any) -> ParallelRequest | None:
    source = prompt.get(str(link[0]), {}) if isinstance(link, list) and link else {}
    if source.get("class_type") != "CPParallelConfig":
        return None
    with contextlib.suppress(Refused):  # values may come from other nodes
        request = ParallelRequest.of(source.get("inputs"))
        return None if request.by_heads or request.nnodes != 1 else request
    return None


def _start(prompt: Prompt, request: ParallelRequest) -> None:
    running, waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    if any(task[2] == prompt for task in (*running, *waiting)):
        with contextlib.suppress(Refused):  # the node itself will raise it
            kinds = [str(node.get("class_type")) for node in prompt.values() if isinstance(node, dict)]
            setup = comfy_setup(compiles=request.compile == "on" or any("Compile" in kind for kind in kinds))
            runtime.start_ahead(last_used(request, plan_without_model(request).placement), setup)
