"""ComfyUI's process: the GPUs that it sees on this machine, the ComfyUI that workers import, and the event cp.refused,
which tells the page which node was refused, and why, as data (web/refusals.js)."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import comfy.model_management
import comfy.options
import comfy.samplers
import comfyui_version
import torch
from comfy_execution.graph import NodeNotFoundError
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...parallel_runtime.accelerators import ACCELERATORS, CUDA
from ...parallel_runtime.errors import Refused, to_json
from ...parallel_runtime.group.machines import checked_plan
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.planning.run_plan import PlanInputs, RunPlan
from ...parallel_runtime.request import ParallelRequest, why_one_gpu
from ...parallel_runtime.specs import ComfySetup, Placement

log = logging.getLogger(__name__)

STARTED_IN = os.getcwd()  # ComfyUI's flags name folders relative to it; packs may change the folder later
EVENT = "cp.refused"


def plan_without_model(request: ParallelRequest, *, guided: bool = False) -> RunPlan:
    """Returns the plan for a check of the request, or for a VAE, which has no heads. Raises Refused."""
    return checked_plan(plan_inputs(request, guided=guided))


def last_used(request: ParallelRequest, placement: Placement) -> Placement:
    """Returns the devices that auto chose last among `placement`; all of them where the request names devices."""
    automatic = plan_inputs(request).automatic_devices
    return runtime.last_auto_placement.get(placement, placement) if automatic else placement


def plan_inputs(request: ParallelRequest, **model: Any) -> PlanInputs:
    """Returns PlanInputs for `request` on this machine. `model`: further fields of PlanInputs."""
    return PlanInputs(request=request, gpus=visible_gpus(), kind=gpu_kind(), **model)


def visible_gpus() -> int:
    """Returns the number of GPUs that ComfyUI sees; 0 where it uses none."""
    if comfy.model_management.get_torch_device().type not in ACCELERATORS:
        return 0
    gpus = torch.accelerator.device_count()
    if why := why_one_gpu(gpus):
        _warn_once(why)
    return gpus


def gpus_json() -> list[dict[str, Any]]:
    """Returns name and memory of each GPU that ComfyUI sees; memory is None for a kind that does not tell it."""
    kind = comfy.model_management.get_torch_device().type
    module = getattr(torch, kind, None)
    each = [module.get_device_properties(index) if module is not None else None for index in range(visible_gpus())]
    facts = [(str(getattr(one, "name", kind)), getattr(one, "total_memory", None)) for one in each]
    return [{"index": index, "name": name, "total_bytes": total} for index, (name, total) in enumerate(facts)]


@cache
def _warn_once(why: str) -> None:
    log.warning("[CP] only one GPU is visible: %s", why)


def gpu_kind() -> str:
    """Returns the device type of the GPUs, such as "cuda"."""
    kind = comfy.model_management.get_torch_device().type
    return kind if kind in ACCELERATORS else CUDA.kind


def comfy_setup(*, compiles: bool = False) -> ComfySetup:
    """Returns this process's ComfyUI, for workers to import. `compiles`: they are started to compile a model."""
    # Where ComfyUI is only imported, the arguments are another program's.
    flags = tuple(sys.argv[1:]) if comfy.options.args_parsing else ()
    root = os.path.dirname(os.path.dirname(inspect.getfile(comfy.samplers)))
    added = [path for path in sys.path if path.startswith(root + os.sep) and "site-packages" not in path]
    paths, version = tuple(os.path.relpath(path, root) for path in added), comfyui_version.__version__
    return ComfySetup(root=root, flags=flags, folder=STARTED_IN, version=version, compiles=compiles, paths=paths)


@contextmanager
def announce_refusals() -> Iterator[None]:
    """Sends a refusal that leaves this block, or a function decorated with it, to the page that queued the run."""
    try:
        yield
    except Refused as refused:
        server, context = PromptServer.instance, get_executing_context()
        node = _on_canvas(context.node_id) if context is not None else server.last_node_id
        prompt = context.prompt_id if context is not None else server.last_prompt_id
        runtime.journal.note(f"[CP] refused: {refused}")
        runtime.refused(refused.sentence)
        if server.client_id is not None:  # None: an API prompt of nobody's page
            event = {"prompt_id": prompt, "node_id": node, "fix": refused.fix, **refusal_json(refused)}
            server.send_sync(EVENT, event, server.client_id)
        raise


def _on_canvas(node: str) -> str:
    """Returns the node that the user sees: in a loop of the graph, and wherever one node runs as others, another id."""
    with suppress(NodeNotFoundError):
        shown: str = get_progress_state().dynprompt.get_display_node_id(node)
        return shown
    return node


def refusal_json(refused: Refused) -> dict[str, Any]:
    """Returns code and values for the user's language, the widget to change, and the sentence in English."""
    return {**to_json(refused.sentence), "widget": refused.widget, "text": str(refused)}
