"""Reports what kernels, networks, graphs and the group do on a machine, as Markdown and JSON. Downloads nothing.

Every measurement is printed and written at once. Each part runs in processes of its own: an error in one becomes a
measurement too, and the others go on. Parts for which there is no time are listed as not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from parallel_runtime.commands import add_comfyui, count, find_comfyui
from parallel_runtime.commands.report import Measurement, Page, in_a_line, machine
from parallel_runtime.demo import REQUIREMENTS
from parallel_runtime.errors import Refused

from .measuring import Setting
from .part import measurements_of

log = logging.getLogger(__name__)

MINUTES = 10.0
LONGER = 3  # times what a part takes on an H100, before it is cut off; more where there are more minutes
SHORTEST_SECONDS = 20.0  # a part that has less is not begun


class ReportPart(NamedTuple):
    """A part of the report: its `module`, and about how many `seconds` it takes on an H100. `by` shares
    its work out: `ranks` of its own, the `workers` of the product, or `nobody`."""

    name: str
    module: str
    title: str
    seconds: float
    by: str
    needs: Literal["ComfyUI", "diffusers", "no more"] = "ComfyUI"


PARTS = (  # the least measured ones first, then by speed and importance
    ReportPart("graph_pools", "tests.gpu.graph_pools", "Memory of CUDA graphs", 30, "nobody", "no more"),
    ReportPart("recordings", "tests.gpu.recordings", "Recorded forwards", 50, "ranks"),
    ReportPart("page_locks", "tests.gpu.page_locks", "Offload without page-locked memory", 10, "nobody", "no more"),
    ReportPart("attention", "tests.bench.report.attention_cases", "Attention against float64", 25, "ranks", "no more"),
    ReportPart("group", "tests.bench.report.group_cases", "The worker group", 70, "workers", "diffusers"),
    ReportPart("networks", "tests.bench.report.network_cases", "ComfyUI's own networks against one rank", 35, "ranks"),
    ReportPart("vae", "tests.bench.report.vae_cases", "CP VAE against one process", 70, "workers"),
    ReportPart("share", "tests.bench.report.rank_share_cases", "A rank's share, without transfers", 150, "nobody"),
    ReportPart("diffusers_own", "tests.bench.report.diffusers_own", "The same by diffusers", 35, "nobody", "diffusers"),
)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        return _measure(options)
    except Refused as refused:
        log.info("%s", refused)
        return 1


def _measure(options: argparse.Namespace) -> int:
    gpus = torch.cuda.device_count() if options.devices == "cuda" else 0
    if options.devices == "cuda" and not gpus:
        log.info("torch sees no CUDA device here; --devices cpu tries the report itself, with tiny networks")
        return 1
    parts, page = list(planned(options, gpus)), Page(options.out, machine())
    try:
        _report(parts, page, options.minutes)
    except KeyboardInterrupt:
        log.info("stopped; results so far are in %s.md and .jsonl", page.out)
        return 1
    log.info("written: %s.md and .jsonl", page.out)
    return 0


def _report(parts: Sequence[tuple[ReportPart, Setting]], page: Page, minutes: float) -> None:
    deadline = time.monotonic() + 60 * minutes
    for number, (part, setting) in enumerate(parts):
        title = f"{part.title}{_where(part, setting)}"
        seconds = max(0.0, min(deadline - time.monotonic(), _estimated_seconds(parts[number:])))
        log.info("[%d of %d] %s; about %.1f min left", number + 1, len(parts), title, seconds / 60)
        page.section(title)
        longest = seconds_for(parts[number:], deadline - time.monotonic(), minutes)
        for measurement in _measurements(part, setting, longest):
            page.add(measurement)
            log.info("  %s", in_a_line(measurement))


def planned(options: argparse.Namespace, gpus: int) -> Iterator[tuple[ReportPart, Setting]]:
    """Yields each part on as many ranks as there are GPUs; with one GPU also on several ranks of it, for their errors.
    Raises Refused where all numbers of ranks are larger than that."""
    base = Setting(kind=options.devices, comfyui=find_comfyui(options.comfyui), tokens=options.tokens)
    world_sizes = [size for size in options.world if size <= (gpus or max(options.world))]
    settings = [replace(base, world_size=size) for size in world_sizes]
    if gpus == 1:
        settings += [replace(base, world_size=size, one_card=True) for size in options.world if size in (2, 4)]
    if not settings:
        raise Refused("report.world", world=min(options.world), gpus=gpus)
    for part in PARTS:
        if part.name not in (options.only or [part.name]):
            continue
        if part.name == "recordings":
            yield from ((part, setting) for setting in _recorded(settings))
        elif part.by == "ranks":
            yield from ((part, setting) for setting in settings)
        else:
            yield part, max(settings, key=lambda each: min(each.world_size, 2)) if part.by == "workers" else base


def _recorded(settings: Sequence[Setting]) -> list[Setting]:
    """Returns one rank, two, and four, which have two communicators; the most of them also with registered buffers."""
    chosen = [setting for setting in settings if setting.world_size in (1, 2, 4)] or [settings[0]]
    most = chosen[-1]
    return chosen + ([replace(most, registered=True)] if most.world_size > 1 and most.kind == "cuda" else [])


def seconds_for(parts: Sequence[tuple[ReportPart, Setting]], remaining: float, minutes: float) -> float:
    """Returns how many of the `remaining` seconds the first of the remaining `parts` may take; the last one gets
    all."""
    part, _ = parts[0]
    share = remaining * part.seconds / _estimated_seconds(parts)
    return min(remaining, max(share, LONGER * part.seconds * minutes / MINUTES))


def _measurements(part: ReportPart, setting: Setting, seconds: float) -> Iterator[Measurement]:
    if part.needs == "ComfyUI" and not setting.comfyui:
        yield {"what": "not run", "note": "no ComfyUI here; --comfyui names its folder"}
    elif part.needs == "diffusers" and importlib.util.find_spec("diffusers") is None:
        yield {"what": "not run", "note": f"no diffusers here; {sys.executable} -m pip install -r {REQUIREMENTS}"}
    elif seconds < SHORTEST_SECONDS:
        yield {"what": "not run", "note": "its share of time is too short; --minutes gives more, --only fewer parts"}
    else:
        setting = setting if part.needs == "ComfyUI" else replace(setting, comfyui="")
        processes = setting.world_size if part.by == "ranks" else 1
        yield from measurements_of(part.module, setting, processes=processes, seconds=seconds)


def _where(part: ReportPart, setting: Setting) -> str:
    if part.by == "nobody":
        return ""
    several = f": {setting.world_size} {part.by}" if setting.world_size > 1 else f": one {part.by.removesuffix('s')}"
    several += ", NCCL_GRAPH_REGISTER=1" if setting.registered else ""
    return f"{several} on one card, over NCCL; times would say nothing" if setting.one_card else several


def _estimated_seconds(parts: Sequence[tuple[ReportPart, Setting]]) -> float:
    return sum(part.seconds for part, _ in parts)


def minutes(text: str) -> float:
    if not (length := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is no length of time; give minutes, such as 10")
    return length


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.report", description=__doc__)
    parser.add_argument("--devices", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny networks, for a trial")
    parser.add_argument("--world", type=count, nargs="+", help="numbers of ranks (default: 1 2 4 8; on the CPU 1 2)")
    parser.add_argument(
        "--tokens",
        type=count,
        help="tokens of the attention that is compared with float64 (default: 4608; on the CPU 67)",
    )
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="run only these parts")
    parser.add_argument(
        "--minutes", type=minutes, default=MINUTES, help="time limit; parts that take longer are left out, with a note"
    )
    add_comfyui(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report"),
        help="name or folder of report.md and .jsonl",
    )
    options = parser.parse_args(arguments)
    on_cpu = options.devices == "cpu"
    options.world = options.world or ([1, 2] if on_cpu else [1, 2, 4, 8])
    options.tokens = options.tokens or (67 if on_cpu else 4608)
    return options
