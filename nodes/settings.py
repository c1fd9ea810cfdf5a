"""What the user chose under ComfyUI's Settings, in force as soon as it is saved. The environment wins.

The frontend declares these settings (web/settings.js) and ComfyUI keeps them; here they are only read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import folder_paths

from ..parallel_runtime.host.planning import MAX_DEGREE
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.specs import ParallelRequest

log = logging.getLogger(__name__)

PREFIX = "CPSampler."
MAX_SECONDS = 1e9
READS, SOON = 4, 0.05  # seconds between them
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
PACKAGES = [name for name in (__package__, ParallelRequest.__module__.rpartition(".")[0]) if name]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """By the names they have in the frontend, without PREFIX. 0 seconds for IdleSeconds is never."""

    IdleSeconds: float = 0.0
    StallSeconds: float = 120.0
    RingDegree: int = 0
    UlyssesDegree: int = 0
    LogLevel: str = "INFO"

    @classmethod
    def of(cls, chosen: Any) -> Settings:
        """From what ComfyUI saved; what is missing, of another kind or out of range is as usual."""
        chosen = chosen if isinstance(chosen, dict) else {}
        kinds = get_type_hints(cls)
        found = {name: chosen.get(PREFIX + name) for name in kinds} | _from_environment()
        return cls(**{name: kinds[name](value) for name, value in found.items() if _fits(kinds[name], value)})

    @property
    def request(self) -> ParallelRequest:
        """What a node without a cp_config asks for."""
        return ParallelRequest(ring_degree=self.RingDegree, ulysses_degree=self.UlyssesDegree, pipeline_degree=0)


def settings_file() -> Path:
    """Of the default user: on a server of several users the workers are not anybody's own."""
    return Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"


def refresh() -> Settings:
    """Put in force what was saved since the last time; costs a look at the file's time."""
    seen = None
    with contextlib.suppress(OSError):
        stat = settings_file().stat()
        seen = (stat.st_mtime_ns, stat.st_size)
    return _in_force(seen)


@lru_cache(maxsize=1)
def _in_force(seen: tuple[int, int] | None) -> Settings:
    """As the file says, of which nobody has `seen` this state yet."""
    settings = Settings.of(_read())
    runtime.stall.choose(settings.StallSeconds)
    runtime.idle.choose(settings.IdleSeconds)
    for package in PACKAGES:
        level = "NOTSET" if settings.LogLevel == Settings.LogLevel else settings.LogLevel  # as ComfyUI's own
        logging.getLogger(package).setLevel(level if level in (*LEVELS, "NOTSET") else "NOTSET")
    return settings


def _read() -> Any:
    """None where there is no such file, or none that can be read: another process may be writing it."""
    for _ in range(READS):
        try:
            return json.loads(settings_file().read_text())
        except OSError:
            return None
        except (ValueError, RecursionError):
            time.sleep(SOON)
    log.warning("[CP] %s cannot be read: what it says of CP Sampler is as usual until it can", settings_file())
    return None


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, variable in (("RingDegree", "CP_RING_DEGREE"), ("UlyssesDegree", "CP_ULYSSES_DEGREE")):
        if (text := os.environ.get(variable, "").strip()).isdecimal():
            found[name] = int(text)
    if (level := os.environ.get("CP_LOG_LEVEL", "").strip().upper()) in LEVELS:
        found["LogLevel"] = level
    return found


def _fits(kind: type, value: Any) -> bool:
    if kind is str:
        return isinstance(value, str)
    number = type(value) is int or (kind is float and type(value) is float)
    return number and 0 <= value <= (MAX_DEGREE if kind is int else MAX_SECONDS)
