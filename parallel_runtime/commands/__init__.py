"""The commands of `python -m parallel_runtime`, demo, join, migrate, packs and report, and their options. Imports no
torch: --help answers at once, with any Python that we support."""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
PACK_SECONDS = 120.0  # a pack whose import takes longer is taken to hang


def log_to(stream: TextIO) -> None:
    """Prints what this package logs on `stream`, of others no more than warnings: ComfyUI tells how it starts."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(
        lambda record: record.name.startswith(__name__.partition(".")[0]) or record.levelno > logging.INFO
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])


def find_comfyui(path: str) -> str:
    """Returns the checkout at `path`, in COMFYUI_PATH, or around this pack if it is in custom_nodes; "" for none."""
    folders = [Path(name).expanduser() for name in (path, os.environ.get("COMFYUI_PATH", "")) if name]
    folders += [ROOT.parent.parent] if ROOT.parent.name == "custom_nodes" else []
    return next((str(folder.absolute()) for folder in folders if _is_checkout(folder)), "")


def _is_checkout(folder: Path) -> bool:
    return (folder / "comfy" / "cli_args.py").is_file()


def add_comfyui(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `find_comfyui` takes."""

    def checkout(text: str) -> str:
        if text and not _is_checkout(Path(text).expanduser()):
            raise argparse.ArgumentTypeError(f"there is no ComfyUI in {text}; name the folder that has its main.py")
        return text

    words = "ComfyUI's folder; otherwise COMFYUI_PATH, or the ComfyUI that contains this pack"
    parser.add_argument("--comfyui", type=checkout, default="", help=words)


def count(text: str) -> int:
    """Parses a number of the command line. Raises ValueError."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"starts at 1, got {text}")
    return number


def _demo(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_runtime demo",
        description="Draw a picture with a small FLUX model on several workers and compare it with one worker's.",
    )
    parser.add_argument("--prompt", default="a red circle on a white background", help="words the demo model knows")
    parser.add_argument("--ring-degree", type=int, default=0, help="GPUs that split the picture in a ring (0: auto)")
    parser.add_argument("--ulysses-degree", type=int, default=0, help="GPUs that split the picture by heads (0: auto)")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cfg", type=float, default=2.5, help="classifier-free guidance scale")
    parser.add_argument("--width", type=int, default=128, help="pixels")
    parser.add_argument("--height", type=int, default=128, help="pixels")
    parser.add_argument("--devices", default="", help="such as 0,1 or cpu,cpu (default: all GPUs, or the CPU)")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="where the PNG goes")
    options = parser.parse_args(arguments)
    if not options.out.absolute().parent.is_dir():
        parser.error(f"--out {options.out} is in a folder that does not exist")
    if options.seed < 0:
        parser.error(f"--seed is 0 or more, got {options.seed}")
    if options.steps < 1:
        parser.error(f"--steps is 1 or more, got {options.steps}")
    if min(options.width, options.height) < 16 or options.width % 8 or options.height % 8:
        parser.error(f"--width and --height are multiples of 8 from 16 up, got {options.width} x {options.height}")
    return options


def _join(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_runtime join",
        description="Lend this machine's devices to the ComfyUI at HOST:PORT, until Ctrl-C. Starts this machine's "
        "workers when the other machine asks for them, ends them when its connection ends, and waits for the next "
        "request.",
    )
    parser.add_argument("endpoint", metavar="HOST:PORT", help="rdzv_endpoint of CP Parallel Config")
    token = "a file with the shared token; otherwise the one $CP_CLUSTER_TOKEN_FILE names"
    parser.add_argument("--token-file", help=token)
    parser.add_argument("--devices", default="", help="such as 0,1 or cpu,cpu; otherwise as many as ComfyUI's machine")
    parser.add_argument("--comfyui", default="", help="ComfyUI's folder here; otherwise the path on ComfyUI's machine")
    return parser.parse_args(arguments)


def _migrate(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_runtime migrate",
        description="Replace native samplers by CP nodes in a saved workflow or an API prompt; with --back, CP nodes "
        "by native samplers. Needs no ComfyUI. A text encoder of more than 4 GB gets a CP CLIP, which --back takes "
        "away. --back leaves the CP Parallel Config in the graph, unconnected, and this pack's other nodes, and names "
        "them.",
    )
    parser.add_argument("workflow", type=Path, help="a saved workflow, or - for standard input")
    back = "replace CP nodes by ComfyUI's own samplers, also those that were never native"
    parser.add_argument("--back", action="store_true", help=back)
    parser.add_argument("--clip", action="store_true", help="a CP CLIP after each loader of text encoders, of any size")
    models = "ComfyUI's folder of models, which says how large text encoders are; else of the ComfyUI around this pack"
    parser.add_argument("--models", type=Path, default=ROOT.parent.parent / "models", help=models)
    parser.add_argument("-o", "--out", type=Path, help="where to write; otherwise NAME.cp.json, or NAME.native.json")
    return parser.parse_args(arguments)


def _packs(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_runtime packs",
        description="Say what each pack of custom nodes puts on models and replaces, and what its import costs a "
        "worker, or why a worker cannot import it. Each is tried in a process of its own, which ends again.",
    )
    add_comfyui(parser)
    hangs = "seconds after which a pack is taken to hang"
    parser.add_argument("--timeout", type=float, default=PACK_SECONDS, help=hangs)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("arguments", nargs="*", help="after --: arguments of ComfyUI, such as --base-directory")
    return parser.parse_args(arguments)


def _report(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_runtime report",
        description="Report what a machine can do, as Markdown and JSON to paste into an issue. Downloads nothing.",
        epilog="Single kernels, networks and graphs (--only, --minutes): `python -m tests.bench.report` measures them.",
    )
    parser.add_argument("--devices", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny network, for a trial")
    parser.add_argument("--world", type=count, nargs="+", help="numbers of workers (default: 1 2 4 8; on the CPU 1 2)")
    add_comfyui(parser)
    out = "name or folder of report.md and .jsonl, or of .workflow.json"
    parser.add_argument("--out", type=Path, default=Path("report"), help=out)
    bug = "measure nothing; write what a bug report needs of this workflow, without texts and file names"
    parser.add_argument("--workflow", type=Path, help=bug)
    steps = "take one step of each sampler of this workflow (exported for the API) natively and on the workers"
    parser.add_argument("--compare", type=Path, help=f"measure nothing; {steps}, and say how far apart they are")
    parser.add_argument("arguments", nargs="*", help="after --, with --compare: arguments of ComfyUI")
    options = parser.parse_args(arguments)
    options.world = options.world or ([1, 2] if options.devices == "cpu" else [1, 2, 4, 8])
    return options


# By name: the file here whose main(options) returns the exit status, and which is imported when the command is called,
# as each needs other packages; what the command is for; and what returns the options of its command line, or exits.
COMMANDS = {
    "demo": ("demo_run", "draw a picture with the small model of this pack", _demo),
    "join": ("join", "lend this machine's devices to a ComfyUI on another", _join),
    "migrate": ("migrate", "convert a saved workflow to CP samplers, or back with --back", _migrate),
    "packs": ("installed_packs", "try which packs of custom nodes workers can import, and what it costs", _packs),
    "report": ("report", "measure what this machine can do", _report),
}
