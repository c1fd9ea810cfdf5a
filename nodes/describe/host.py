"""ComfyUI's process: the GPUs that it sees on this machine, the ComfyUI that workers import, the user's settings, and
the event cp.refused, which tells the page which node was refused, and why, as data (web/refusals.js).

The user's choices under ComfyUI's Settings are applied when they are saved. web/settings.js declares them and ComfyUI
stores them. Environment variables win over them.

Workers may start before a node asks for them: with ComfyUI, if the user has set that, and while ComfyUI still encodes
text, once a prompt with a CP node has run for WAIT_SECONDS."""

import inspect
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self, get_type_hints

import comfy.options
import comfyui_version
import folder_paths
import torch
from comfy import model_management, samplers
from comfy_execution.graph import NodeNotFoundError
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...parallel_runtime import TESTED, accelerators, numbers, specs
from ...parallel_runtime.commands.migrate import REPLACEMENTS
from ...parallel_runtime.errors import Refused, say_if, to_json
from ...parallel_runtime.group import machines, worker_group
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.planning.run_plan import PlanInputs, RunPlan
from ...parallel_runtime.request import MAX_DEGREE, ParallelRequest, why_one_gpu

log = logging.getLogger(__name__)

STARTED_IN = os.getcwd()  # ComfyUI's flags name folders relative to it; packs may change the folder later
EVENT = "cp.refused"
PREFIX = "CPSampler."
MAX_SECONDS = 1e9
READS, READ_PAUSE_SECONDS = 4, 0.05
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
OFF = ("0", "false", "no", "off")
PACKAGES = [__name__.rsplit(".", 2)[0], ParallelRequest.__module__.rpartition(".")[0]]  # loggers that get the level
CP_NODES = {*REPLACEMENTS.values(), "CPLoadDiffusionModel", "CPModel"}
WAIT_SECONDS = 2.0  # a prompt that is refused or cached is over by then
Prompt = dict[str, dict[str, Any]]


def plan_without_model(request: ParallelRequest, *, guided: bool = False) -> RunPlan:
    """Returns the plan for a check of the request, or for a VAE, which has no heads. Raises Refused."""
    return machines.checked_plan(plan_inputs(request, guided=guided))


def last_used(request: ParallelRequest, placement: specs.Placement) -> specs.Placement:
    """Returns the devices that auto chose last among `placement`; all of them where the request names devices."""
    automatic = plan_inputs(request).automatic_devices
    return runtime.last_auto_placement.get(placement, placement) if automatic else placement


def plan_inputs(request: ParallelRequest, **model: Any) -> PlanInputs:
    """Returns PlanInputs for `request` on this machine. `model`: further fields of PlanInputs."""
    return PlanInputs(request=request, gpus=visible_gpus(), kind=gpu_kind(), **model)


def visible_gpus() -> int:
    """Returns the number of GPUs that ComfyUI sees; 0 where it uses none."""
    if model_management.get_torch_device().type not in accelerators.ACCELERATORS:
        return 0
    gpus = torch.accelerator.device_count()
    if why := why_one_gpu(gpus):
        _warn_once(why)
    return gpus


@cache
def _warn_once(why: str) -> None:
    log.warning("[CP] only one GPU is visible: %s", why)


def gpu_kind() -> str:
    """Returns the device type of the GPUs, such as "cuda"."""
    kind = model_management.get_torch_device().type
    return kind if kind in accelerators.ACCELERATORS else accelerators.CUDA.kind


def comfy_setup(*, compiles: bool = False) -> specs.ComfySetup:
    """Returns this process's ComfyUI, for workers to import. `compiles`: they are started to compile a model."""
    # Where ComfyUI is only imported, the arguments are another program's.
    flags = tuple(sys.argv[1:]) if comfy.options.args_parsing else ()
    root = os.path.dirname(os.path.dirname(inspect.getfile(samplers)))
    added = [path for path in sys.path if path.startswith(root + os.sep) and "site-packages" not in path]
    paths, version = tuple(os.path.relpath(path, root) for path in added), comfyui_version.__version__
    return specs.ComfySetup(root=root, flags=flags, folder=STARTED_IN, version=version, compiles=compiles, paths=paths)


def untested() -> str:
    """Returns a sentence where this ComfyUI has a newer minor version than our tests have run, else ""."""
    found, tested = numbers(comfyui_version.__version__)[:2], numbers(TESTED)[:2]
    return say_if(found > tested, "untested", tested="{}.{}".format(*tested), found="{}.{}".format(*found))


@contextmanager
def announce_refusals() -> Iterator[None]:
    """Sends a refusal that leaves this block, or a function decorated with it, to the page that queued the run."""
    try:
        yield
    except Refused as refused:
        server, context = PromptServer.instance, get_executing_context()
        node, prompt = server.last_node_id, server.last_prompt_id
        if context is not None:
            node, prompt = context.node_id, context.prompt_id
            with suppress(NodeNotFoundError):  # in a loop of the graph the node that the user sees has another id
                node = get_progress_state().dynprompt.get_display_node_id(node)
        runtime.journal.note(f"[CP] refused: {refused}")
        runtime.refused(refused.sentence)
        if server.client_id is not None:  # None: an API prompt of nobody's page
            event = {"prompt_id": prompt, "node_id": node, "fix": refused.fix, **refusal_json(refused)}
            server.send_sync(EVENT, event, server.client_id)
        raise


def refusal_json(refused: Refused) -> dict[str, Any]:
    """Returns code and values for the user's language, the widget to change, and the sentence in English."""
    return {**to_json(refused.sentence), "widget": refused.widget, "text": str(refused)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings by their names in the frontend, without PREFIX. IdleSeconds 0: workers are never ended."""

    IdleSeconds: float = 0.0
    StallSeconds: float = worker_group.STALL_DEFAULT
    RingDegree: int = 0
    UlyssesDegree: int = 0
    LogLevel: str = "INFO"
    Devices: str = ""
    StartWithComfyUI: bool = False

    @classmethod
    def of(cls, chosen: Any) -> Self:
        """Returns the settings in ComfyUI's file; missing and invalid ones have their defaults."""
        chosen = chosen if isinstance(chosen, dict) else {}
        kinds = get_type_hints(cls)
        values = {name: chosen.get(PREFIX + name) for name in kinds} | _from_environment()
        return cls(**{name: kinds[name](value) for name, value in values.items() if _is_valid(kinds[name], value)})

    @property
    def request(self) -> ParallelRequest:
        """Returns the request of a node without a cp_config."""
        ring, ulysses, devices = self.RingDegree, self.UlyssesDegree, self.Devices.strip()
        return ParallelRequest(devices=devices, ring_degree=ring, ulysses_degree=ulysses, pipeline_degree=0)


def settings_file() -> Path:
    """Returns the default user's file: all users of a server share the workers."""
    return Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"


def refresh() -> Settings:
    """Applies saved changes; costs one os.stat where there are none."""
    version = None
    with suppress(OSError):
        stat = settings_file().stat()
        version = (stat.st_mtime_ns, stat.st_size)
    return _apply(version)


def request_from(cp_config: object) -> ParallelRequest:
    """Returns the request on a `cp_config` socket, or the default request. Raises Refused for anything else."""
    if cp_config is None:
        return refresh().request
    if not isinstance(cp_config, ParallelRequest):
        raise Refused("config.kind", kind=type(cp_config).__name__)
    return cp_config


@lru_cache(maxsize=1)
def _apply(version: tuple[int, int] | None) -> Settings:
    """Applies the file's settings, once for each `version` (time of change, size) of it."""
    chosen: Any = None  # where there is no file, or none that is valid after several reads
    for _ in range(READS):
        try:
            chosen = json.loads(settings_file().read_text())
            break
        except OSError:
            break
        except (ValueError, RecursionError):
            time.sleep(READ_PAUSE_SECONDS)  # ComfyUI may be in the middle of writing it
    else:
        log.warning("[CP] %s is not valid JSON; CP Sampler uses its default settings", settings_file())
    settings = Settings.of(chosen)
    if not os.environ.get("CP_STALL_SECONDS", "").strip():
        runtime.stall_seconds = settings.StallSeconds or Settings.StallSeconds
    if not os.environ.get("CP_IDLE_SECONDS", "").strip():
        runtime.idle_seconds = settings.IdleSeconds
    runtime.default_devices = settings.Devices
    # In ComfyUI's user folder, which outlives a container.
    runtime.measured.path = os.path.join(folder_paths.get_user_directory(), "context-parallel-sampler", "measured.json")
    level = settings.LogLevel
    for package in PACKAGES:  # by default as ComfyUI's own
        logging.getLogger(package).setLevel(level if level in LEVELS and level != Settings.LogLevel else "NOTSET")
    return settings


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, variable in {"RingDegree": "CP_RING_DEGREE", "UlyssesDegree": "CP_ULYSSES_DEGREE"}.items():
        text = os.environ.get(variable, "").strip()
        if text.isdecimal() and len(text) < 10 and int(text) <= MAX_DEGREE:
            values[name] = int(text)
        elif text:
            words = "[CP] %s=%r is not a degree from 0 to %d; the saved setting is used"
            log.warning(words, variable, text, MAX_DEGREE)
    if (level := os.environ.get("CP_LOG_LEVEL", "").strip().upper()) in LEVELS:
        values["LogLevel"] = level
    if devices := os.environ.get("CP_DEVICES", "").strip():
        values["Devices"] = devices
    if start := os.environ.get("CP_START_WITH_COMFYUI", "").strip():
        values["StartWithComfyUI"] = start.lower() not in OFF
    return values


def _is_valid(kind: type, value: Any) -> bool:
    if kind in (str, bool):
        return type(value) is kind
    number = type(value) is int or (kind is float and type(value) is float)
    return number and 0 <= value <= (MAX_DEGREE if kind is int else MAX_SECONDS)


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
        if not isinstance(node, dict) or node.get("class_type") not in CP_NODES:
            continue
        link = node.get("inputs", {}).get("cp_config")
        if link is None:
            return request_from(None)
        source = prompt.get(str(link[0]), {}) if isinstance(link, list) and link else {}
        if source.get("class_type") == "CPParallelConfig":
            with suppress(Refused):  # values may come from other nodes
                request = ParallelRequest.of(source.get("inputs"))
                return None if request.by_heads or request.nnodes != 1 else request
        return None
    return None


def _start(prompt: Prompt, request: ParallelRequest) -> None:
    running, waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    if any(task[2] == prompt for task in (*running, *waiting)):
        with suppress(Refused):  # the node itself will raise it
            kinds = [str(node.get("class_type")) for node in prompt.values() if isinstance(node, dict)]
            setup = comfy_setup(compiles=request.compile == "on" or any("Compile" in kind for kind in kinds))
            runtime.start_ahead(last_used(request, plan_without_model(request).placement), setup)
