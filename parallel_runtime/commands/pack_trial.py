"""Tries the packs of a ComfyUI one after the other, each in a process of its own that has imported what a worker has,
and prints a line of JSON for each: a process of `packs`."""

import importlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import FunctionType
from typing import Any

import torch

from ..errors import Refused
from ..specs import ComfySetup
from ..worker.comfy_loop import import_comfyui

COMFYUI = ("comfy", "comfy_extras", "comfy_execution", "comfy_api", "nodes", "execution", "folder_paths")
TORCH = ("torch.nn", "torch.functional")
STATUS = "/proc/self/status"
POLL_SECONDS = 0.05


def main(comfyui: str, seconds: str, *flags: str) -> None:
    """`seconds`: after them a pack is taken to hang; `flags` are ComfyUI's."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ComfyUI prints is none of them
    import_comfyui(ComfySetup(root=comfyui, flags=flags, folder=os.getcwd()), torch.device("cpu"))
    packs = importlib.import_module("..loading.code_names", __package__)  # it needs ComfyUI
    packs.prepare_imports()
    for path in packs.installed():
        made = {"pack": os.path.basename(path), "path": path, **tried(packs, path, float(seconds))}
        print(json.dumps(made), file=lines, flush=True)


def tried(packs: Any, path: str, seconds: float) -> dict[str, Any]:
    """Has a copy of this process import the pack, and ends that, with what it has started."""
    failed: dict[str, Any] = {"imports": False, "seconds": None, "mb": None, "replaces": [], "threads": []}
    with TemporaryFile("w+") as answer, TemporaryFile("w+", errors="replace") as output:
        if (copy := os.fork()) == 0:
            try:
                os.setsid()
                signal.alarm(2 * math.ceil(seconds))  # ends it, also where nobody is left to do so
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                json.dump(imported(packs, path), answer)
                answer.flush()
            finally:
                os._exit(0)  # a pack's threads may not end
        try:
            code = _ended(copy, seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(copy, signal.SIGKILL)
        if code is None:
            os.waitpid(copy, 0)
            return {**failed, "reason": f"its import had not ended after {seconds:.0f} s"}
        answer.seek(0)
        if text := answer.read():
            return {**failed, **json.loads(text)}
        output.seek(0)
        last = "".join(output.read().strip().splitlines()[-1:])
        return {
            **failed,
            "reason": f"it ended the process that imported it, with exit code {code}; {last or 'no message'}",
        }


def _ended(process: int, seconds: float) -> int | None:
    """Waits for a process, and returns its exit code, None where it has not ended after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    return None


def imported(packs: Any, path: str) -> dict[str, Any]:
    """Imports the pack in this process, and returns what that took and replaced, or why it failed."""
    before, threads, memory, started = code_in_place(), {*threading.enumerate()}, _memory(), time.perf_counter()
    reason = ""
    try:
        packs.import_pack(f"{os.path.basename(path)}@{packs.pack_fingerprint(path)}")
    except Refused as refused:
        reason = str(refused)
    seconds, grown, after = time.perf_counter() - started, _memory() - memory, code_in_place()
    return {
        "imports": not reason,
        "reason": reason,
        "seconds": round(seconds, 3),
        "mb": round(grown / 1000, 1),
        "replaces": [name for name, code in before.items() if not _is_same(code, after.get(name))],
        "threads": [thread.name for thread in threading.enumerate() if thread not in threads],
    }


def code_in_place() -> dict[str, Callable[..., Any]]:
    """Returns the functions of ComfyUI and torch.nn, and the methods of their classes, by name."""
    found = {}
    for module, content in list(sys.modules.items()):
        if not (module.partition(".")[0] in COMFYUI or module.startswith(TORCH)):
            continue
        for name, value in list(vars(content).items()):
            if isinstance(value, type) and value.__module__ == module:
                found.update({f"{module}.{name}.{key}": one for key, one in vars(value).items() if callable(one)})
            elif callable(value) and not isinstance(value, type):
                found[f"{module}.{name}"] = value
    return found


def _is_same(before: Callable[..., Any], after: Callable[..., Any] | None) -> bool:
    """Is it what it was, or that anew, as after a reload of its module?"""
    old, new = (getattr(one, "__func__", one) for one in (before, after))
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        return old.__code__ == new.__code__
    return type(old) is type(new)


def _memory() -> int:
    """Returns the KiB of main memory that this process has for itself, 0 where the system does not say."""
    lines = Path(STATUS).read_text().splitlines() if os.path.exists(STATUS) else []
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
