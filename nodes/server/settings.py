"""Reads the user's choices under ComfyUI's Settings, and applies them when they are saved. web/settings.js declares
them and ComfyUI stores them. Environment variables win over them.

Workers may start before a node asks for them: with ComfyUI, if the user has set that, and while ComfyUI still encodes
text, once a prompt with a CP node has run for WAIT_SECONDS."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import folder_paths
from server import PromptServer

from ...parallel_runtime.commands.migrate import REPLACEMENTS
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.group.worker_group import STALL_DEFAULT
from ...parallel_runtime.request import MAX_DEGREE, ParallelRequest
from ..describe.host import comfy_setup, last_used, plan_without_model

log = logging.getLogger(__name__)

PREFIX = "CPSampler."
MAX_SECONDS = 1e9
READS, READ_PAUSE_SECONDS = 4, 0.05
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
OFF = ("0", "false", "no", "off")
PACKAGES = [__name__.rsplit(".", 2)[0], ParallelRequest.__module__.rpartition(".")[0]]  # loggers that get the level
CP_NODES = {*REPLACEMENTS.values(), "CPLoadDiffusionModel", "CPModel"}
WAIT_SECONDS = 2.0  # a prompt that is refused or cached is over by then
Prompt = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings by their names in the frontend, without PREFIX. IdleSeconds 0: workers are never ended."""

    IdleSeconds: float = 0.0
    StallSeconds: float = STALL_DEFAULT
    RingDegree: int = 0
    UlyssesDegree: int = 0
    LogLevel: str = "INFO"
    Devices: str = ""
    StartWithComfyUI: bool = False

    @classmethod
    def of(cls, chosen: Any) -> Settings:
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
    with contextlib.suppress(OSError):
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
    settings = Settings.of(_read())
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


def _read() -> Any:
    """Returns the file's JSON; None without the file, or where it stays invalid after several reads."""
    for _ in range(READS):
        try:
            return json.loads(settings_file().read_text())
        except OSError:
            return None
        except (ValueError, RecursionError):
            # ComfyUI may be in the middle of writing it.
            time.sleep(READ_PAUSE_SECONDS)
    log.warning("[CP] %s is not valid JSON; CP Sampler uses its default settings", settings_file())
    return None


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, variable in (("RingDegree", "CP_RING_DEGREE"), ("UlyssesDegree", "CP_ULYSSES_DEGREE")):
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
