"""python -m parallel_runtime packs: what each pack of custom nodes puts on models and replaces, and what its import
costs a worker, or why a worker cannot import it. Each is tried in a process of its own, which ends again."""

import argparse
import ast
import importlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import FunctionType
from typing import Any

import torch

from ..errors import Refused
from ..specs import ComfySetup
from ..worker.comfy_loop import import_comfyui
from . import ROOT, find_comfyui, log_to

log = logging.getLogger(__name__)

Json = dict[str, Any]
PUTS = {  # what source code names that puts this on a MODEL
    "CFG functions": ("set_model_sampler_cfg_function", "sampler_cfg_function"),
    "pre-CFG functions": ("set_model_sampler_pre_cfg_function", "sampler_pre_cfg_function"),
    "post-CFG functions": ("set_model_sampler_post_cfg_function", "sampler_post_cfg_function"),
    "wrappers of model calls": ("set_model_unet_function_wrapper", "model_function_wrapper"),
    "wrappers": ("add_wrapper", "add_wrapper_with_key"),
    "callbacks": ("add_callback", "add_callback_with_key"),
    "object patches": ("add_object_patch",),
    "attention patches": ("set_model_attn1_patch", "set_model_attn2_patch", "set_model_attn1_output_patch",
                          "set_model_attn2_output_patch"),
    "replaced attention or blocks": ("set_model_attn1_replace", "set_model_attn2_replace", "set_model_patch_replace"),
    "block patches": ("set_model_input_block_patch", "set_model_input_block_patch_after_skip",
                      "set_model_output_block_patch", "set_model_patch"),
    "attention overrides": ("optimized_attention_override",),
    "injections": ("set_injections",),
    "additional MODELs": ("set_additional_models",),
    "samplers": ("KSAMPLER",),
    "guiders": ("CFGGuider",),
    "loaded MODELs": ("load_diffusion_model", "load_diffusion_model_state_dict", "load_checkpoint_guess_config"),
}  # fmt: skip
COMFYUI = ("comfy", "comfy_extras", "comfy_execution", "comfy_api", "nodes", "execution", "folder_paths")
TORCH = ("torch.nn", "torch.functional")
STATUS = "/proc/self/status"
POLL_SECONDS = 0.05


def main(options: argparse.Namespace) -> int:
    log_to(sys.stdout)
    try:
        if not (comfyui := find_comfyui(options.comfyui)):
            raise Refused("report.no_comfyui")
        if not options.json:
            log.info("importing ComfyUI, and each pack after it, as a worker does")
        found = rows(comfyui, options.arguments, options.timeout)
        for text in [json.dumps([*found], indent=1)] if options.json else in_lines(found):
            log.info("%s", text)
    except Refused as refused:
        log.info("%s", refused)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def rows(comfyui: str, arguments: Sequence[str], seconds: float) -> Iterator[Json]:
    """Yields each installed pack's row, by name. Raises Refused where ComfyUI itself cannot be imported."""
    module = f"{__package__}.{Path(__file__).stem}"
    command = [sys.executable, "-m", module, comfyui, str(seconds), *arguments]
    with TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output)
        try:
            for line in process.stdout or ():
                found = json.loads(line)
                yield {**found, "puts": puts(Path(found["path"]))}
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
        if code:
            output.seek(0)
            reason = "".join(output.read().strip().splitlines()[-1:])
            raise Refused("packs.comfyui", folder=comfyui, reason=reason or str(code))


def puts(path: Path) -> list[str]:
    """Returns what the sources of a pack name that is put on a MODEL."""
    names: set[str] = set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        try:
            nodes = ast.walk(ast.parse(file.read_bytes()))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in nodes:
            named = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
            if isinstance(named, str):
                names.add(named)
    return [what for what, those in PUTS.items() if names & {*those}]


def in_lines(found: Iterator[Json]) -> Iterator[str]:
    """Yields the lines of a table for the terminal, each as soon as its pack has been tried."""
    yield f"{'pack':40} {'import':>8} {'memory':>8}  puts on models; replaces"
    row = None
    for row in found:
        cost = f"{row['seconds']:7.2f}s {row['mb']:6.0f}MB" if row["imports"] else f"{'fails':>8} {'':>8}"
        puts, replaces = (", ".join(row[name]) or "nothing" for name in ("puts", "replaces"))
        yield f"{row['pack']:40} {cost}  {puts}; {replaces}"
        if not row["imports"]:
            yield f"    {row['reason']}"
        if row["threads"]:
            yield f"    it starts threads: {', '.join(row['threads'])}"
    if row is None:
        yield "ComfyUI has no other packs than this one"


def try_each(comfyui: str, seconds: str, *flags: str) -> None:
    """Tries each pack in a copy of this process, which has imported what a worker has, and prints a line of JSON for
    each. `seconds`: after them a pack is taken to hang; `flags` are ComfyUI's."""
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
            deadline, ended = time.monotonic() + seconds, (0, 0)
            while not ended[0] and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                ended = os.waitpid(copy, os.WNOHANG)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(copy, signal.SIGKILL)
        if not ended[0]:
            os.waitpid(copy, 0)
            return {**failed, "reason": f"its import had not ended after {seconds:.0f} s"}
        code = os.waitstatus_to_exitcode(ended[1])
        answer.seek(0)
        if text := answer.read():
            return {**failed, **json.loads(text)}
        output.seek(0)
        last = "".join(output.read().strip().splitlines()[-1:])
        reason = f"it ended the process that imported it, with exit code {code}; {last or 'no message'}"
        return {**failed, "reason": reason}


def imported(packs: Any, path: str) -> dict[str, Any]:
    """Imports the pack in this process, and returns what that took and replaced, or why it failed."""
    before, threads, memory, started = code_in_place(), {*threading.enumerate()}, _memory(), time.perf_counter()
    reason = ""
    try:
        packs.import_pack(f"{os.path.basename(path)}@{packs.pack_fingerprint(path)}")
    except Refused as refused:
        reason = str(refused)
    seconds, grown, after = time.perf_counter() - started, _memory() - memory, code_in_place()
    replaced = []
    for name, code in before.items():
        old, new = (getattr(one, "__func__", one) for one in (code, after.get(name)))
        if isinstance(old, FunctionType) and isinstance(new, FunctionType):
            same = old.__code__ == new.__code__  # it may be that anew, as after a reload of its module
        else:
            same = type(old) is type(new)
        if not same:
            replaced.append(name)
    return {
        "imports": not reason,
        "reason": reason,
        "seconds": round(seconds, 3),
        "mb": round(grown / 1000, 1),
        "replaces": replaced,
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


def _memory() -> int:
    """Returns the KiB of main memory that this process has for itself, 0 where the system does not say."""
    lines = Path(STATUS).read_text().splitlines() if os.path.exists(STATUS) else []
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    try_each(*sys.argv[1:])
