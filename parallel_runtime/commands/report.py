"""Reports what a machine can do, as Markdown and JSON to paste into an issue. Downloads nothing."""

import argparse
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..accelerators import version_of
from ..errors import Refused
from . import report_measuring, report_workflow
from .report_measuring import Page, compare, in_a_line

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
NO_COMFYUI = {"what": "not run", "note": "no ComfyUI here; --comfyui names its folder"}
PARTS = "Single kernels, networks and graphs (--only, --minutes) are measured by `python -m tests.bench.report`."


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        if options.compare:
            on_cpu = ["--cpu"] if options.devices == "cpu" else []
            return compare(options.compare, find_comfyui(options.comfyui), [*on_cpu, *options.arguments])
        return _summarise_workflow(options) if options.workflow else _measure(options)
    except KeyboardInterrupt:
        log.info("stopped")
        return 1
    except Refused as refused:
        log.info("%s", refused)
        return 1


def _summarise_workflow(options: argparse.Namespace) -> int:
    hardware = machine()
    versions = {name: hardware[name] for name in ("python", "torch", "cuda", "devices")}
    written = report_workflow.write(options.workflow, options.out, find_comfyui(options.comfyui), versions)
    log.info("written: %s. %s", written, report_workflow.CONTAINS)
    return 0


def _measure(options: argparse.Namespace) -> int:
    gpus = torch.cuda.device_count() if options.devices == "cuda" else 0
    if options.devices == "cuda" and not gpus:
        log.info("torch sees no CUDA device here; --devices cpu tries the report itself, with a tiny network")
        return 1
    comfyui = find_comfyui(options.comfyui)
    placements, page = report_measuring.placements(options.world, gpus), Page(options.out, machine(comfyui))
    page.section("FLUX with random weights on the workers")
    try:
        for row in report_measuring.measurements(comfyui, placements) if comfyui else [NO_COMFYUI]:
            page.add(row)
            log.info("%s", in_a_line(row))
    except KeyboardInterrupt:
        log.info("stopped; results so far are in %s.md and .jsonl", page.out)
        return 1
    log.info("written: %s.md and .jsonl", page.out)
    return 0


def machine(comfyui: str = "") -> dict[str, Any]:
    """Returns the versions, ComfyUI's in this folder too, and the hardware that results depend on."""
    cuda = torch.cuda.is_available()
    return {
        "context-parallel-sampler": _value_in(ROOT / "pyproject.toml", "version", "="),
        "comfyui": _value_in(Path(comfyui) / "comfyui_version.py", "__version__", "=") if comfyui else None,
        "cpu": f"{_value_in(Path('/proc/cpuinfo'), 'model name', ':') or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": version_of("diffusers"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": _output("nvidia-smi", "topo", "-m"),
    }


def find_comfyui(path: str) -> str:
    """Returns the checkout at `path`, in COMFYUI_PATH, or around this pack if it is in custom_nodes; "" for none."""
    folders = [Path(name).expanduser() for name in (path, os.environ.get("COMFYUI_PATH", "")) if name]
    folders += [ROOT.parent.parent] if ROOT.parent.name == "custom_nodes" else []
    return next((str(folder.absolute()) for folder in folders if _is_checkout(folder)), "")


def _is_checkout(folder: Path) -> bool:
    return (folder / "comfy" / "cli_args.py").is_file()


def count(text: str) -> int:
    """Parses a number of the command line. Raises ValueError, as `checkout` does."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"starts at 1, got {text}")
    return number


def checkout(text: str) -> str:
    if text and not _is_checkout(Path(text).expanduser()):
        raise argparse.ArgumentTypeError(f"there is no ComfyUI in {text}; name the folder that has its main.py")
    return text


def add_comfyui(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `find_comfyui` takes."""
    words = "ComfyUI's folder; otherwise COMFYUI_PATH, or the ComfyUI that contains this pack"
    parser.add_argument("--comfyui", type=checkout, default="", help=words)


def _value_in(path: Path, name: str, between: str) -> str | None:
    """Returns the first value of `name` in a file of lines such as `name = value`, without quotes."""
    lines = path.read_text().splitlines() if path.is_file() else []
    values = (value for key, _, value in (line.partition(between) for line in lines) if key.strip() == name)
    return next((value.strip(' "') for value in values), None)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parallel_runtime report", description=__doc__, epilog=PARTS)
    parser.add_argument("--devices", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny network, for a trial")
    parser.add_argument("--world", type=count, nargs="+", help="numbers of workers (default: 1 2 4 8; on the CPU 1 2)")
    add_comfyui(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("report"), help="name or folder of report.md and .jsonl, or of .workflow.json"
    )
    parser.add_argument(
        "--workflow",
        type=Path,
        help="measure nothing; write what a bug report needs of this workflow, without texts and file names",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        help="measure nothing; take one step of each sampler of this workflow (exported for the API) natively and on "
        "the workers, and say how far apart they are",
    )
    parser.add_argument("arguments", nargs="*", help="after --, with --compare: arguments of ComfyUI")
    options = parser.parse_args(arguments)
    options.world = options.world or ([1, 2] if options.devices == "cpu" else [1, 2, 4, 8])
    return options
