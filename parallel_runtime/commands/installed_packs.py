"""python -m parallel_runtime packs: what each pack of custom nodes puts on models and replaces, and what its import
costs a worker, or why a worker cannot import it. Each is tried in a process of its own, which ends again."""

import argparse
import ast
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..errors import Refused
from .report import add_comfyui, find_comfyui

log = logging.getLogger(__name__)

Json = dict[str, Any]
TRIAL = f"{__package__}.pack_trial"
SECONDS = 120.0  # a pack that takes longer is taken to hang
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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m parallel_runtime packs", description=__doc__)
    add_comfyui(parser)
    parser.add_argument("--timeout", type=float, default=SECONDS, help="seconds after which a pack is taken to hang")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("arguments", nargs="*", help="after --: arguments of ComfyUI, such as --base-directory")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        if not (comfyui := find_comfyui(options.comfyui)):
            raise Refused("report.no_comfyui")
        if not options.json:
            log.info("importing ComfyUI, and each pack after it, as a worker does")
        found = rows(comfyui, options.arguments, options.timeout)
        if options.json:
            log.info("%s", json.dumps([*found], indent=1))
        for line in () if options.json else in_lines(found):
            log.info("%s", line)
    except Refused as refused:
        log.info("%s", refused)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def rows(comfyui: str, arguments: Sequence[str], seconds: float) -> Iterator[Json]:
    """Yields each installed pack's row, by name. Raises Refused where ComfyUI itself cannot be imported."""
    command, root = [sys.executable, "-m", TRIAL, comfyui, str(seconds), *arguments], Path(__file__).parents[2]
    with TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output)
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
