"""What a machine with GPUs can tell us in its first hour, as Markdown and JSON to paste into an issue.

    python -m tests.gpu.report [--devices cuda|cpu] [--world 1 2 4 8] [--tokens 4608] [--out report]

Downloads nothing. Each part runs in processes of its own, so that what breaks in one is told and the others go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch

from ..comfyui.comfy import find_comfy, why_there_is_none

log = logging.getLogger(__name__)

LIMIT_SECONDS = 600
TITLES = {
    "attention": "Attention against float64",
    "networks": "ComfyUI's own networks against one rank",
    "group": "The worker group",
}
SECTIONS = {  # their columns, and how each is written
    "attention": {"what": "{}", "dtype": "{}", "error": "{:.1e}", "alone": "{:.1e}", "ms": "{:.3f}"},
    "networks": {"what": "{}", "weights": "{}", "degrees": "{}", "error": "{:.1e}", "ms": "{:.1f}", "faster": "{:.2f}"},
    "group": {"what": "{}", "seconds": "{:.2f}"},
}


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    gpus = torch.cuda.device_count() if options.devices == "cuda" else 0
    if options.devices == "cuda" and not gpus:
        log.info("torch sees no CUDA device here; --devices cpu tries the report itself")
        return 1
    worlds = [world for world in options.world if world <= (gpus or max(options.world))]
    comfy = find_comfy()
    found = {
        "machine": machine(),
        "attention": [_part("report_ranks", world, options) for world in worlds],
        "networks": [_part("report_networks", world, options, comfy.python) for world in worlds]
        if comfy
        else why_there_is_none(),
        "group": [_part("report_group", max(worlds), options)],
    }
    text = markdown(found)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)
    log.info("%s", text)
    return 0


def machine() -> dict[str, Any]:
    """What results depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": _output("nvidia-smi", "topo", "-m"),
    }


def _part(module: str, world: int, options: argparse.Namespace, python: Path | str = sys.executable) -> dict[str, Any]:
    """What `world` ranks found, or why they found nothing."""
    out = options.out.with_suffix(f".{world}").absolute()
    out.unlink(missing_ok=True)
    arguments = ["--device", options.devices, "--tokens", str(options.tokens), "--out", str(out)]
    command = [str(python), "-m", f"tests.gpu.{module}", "--launch", str(world), *arguments]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=_environment())
        failure = "" if done.returncode == 0 else done.stderr[-2000:]
    except subprocess.TimeoutExpired:
        failure = f"nothing was heard for {LIMIT_SECONDS} s"
    rows = json.loads(out.read_text()) if out.exists() else []
    out.unlink(missing_ok=True)
    return {"world": world, "seconds": round(time.monotonic() - started), "rows": rows, "failure": failure}


def _environment() -> dict[str, str]:
    comfy = find_comfy()
    return {**os.environ, "COMFYUI_PATH": str(comfy.root)} if comfy else dict(os.environ)


def markdown(found: dict[str, Any]) -> str:
    lines = ["## Machine", *(f"- {name}: {value}" for name, value in found["machine"].items() if name != "topology")]
    if found["machine"]["topology"]:
        lines += ["", "```", found["machine"]["topology"], "```"]
    for section, columns in SECTIONS.items():
        if isinstance(found[section], str):
            lines += ["", f"## {TITLES[section]}", "", found[section]]
            continue
        for part in found[section]:
            lines += ["", f"## {TITLES[section]}: {part['world']} rank(s), {part['seconds']} s", ""]
            lines += [_line(columns), _line(["---"] * len(columns))]
            lines += [_line([form.format(row[name]) for name, form in columns.items()]) for row in part["rows"]]
            if part["failure"]:
                lines += ["", "It failed:", "```", part["failure"], "```"]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=4608)
    parser.add_argument("--out", type=Path, default=Path("report"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
