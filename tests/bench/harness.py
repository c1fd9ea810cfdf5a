"""What the commands of this folder share: options, ranks in one gloo group, modes that take turns, a table, JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..comfyui.comfy import find_comfy

Row = dict[str, Any]
T = TypeVar("T")


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Parses --json and an option for each default, with the default's type: a list takes several, False is a flag."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        several = isinstance(default, list)
        kind: dict[str, Any] = {"type": type(default[0] if several else default), "nargs": "+" if several else None}
        kind = {"action": "store_true"} if default is False else kind | {"default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"default: {default}", **kind)
    parser.add_argument("--json", type=Path, help="a file for the rows")
    return parser.parse_args()


def is_rank() -> bool:
    return "BENCH_FOLDER" in os.environ


def launch(
    name: str,
    *more: str,
    workers: int = 1,
    in_comfyui: bool = False,
    within: Sequence[Sequence[str]] = (),
    interface: str = "lo",
) -> list[Row]:
    """Runs this command once per rank, with its own options and `more`, and returns the rows of rank 0. `in_comfyui`
    takes ComfyUI's python, and `within` has a command for each rank that runs it. Ranks use no ports: they meet in a
    file."""
    comfy = find_comfy() if in_comfyui else None
    assert comfy or not in_comfyui, "there is no ComfyUI"
    with tempfile.TemporaryDirectory() as folder:
        shared = {"BENCH_FOLDER": folder, "WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": interface}
        shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        shared |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}
        shared |= {"COMFYUI_PATH": str(comfy.root)} if comfy else {}
        python = str(comfy.python) if comfy else sys.executable
        command = [python, "-m", f"tests.bench.{name}", *sys.argv[1:], *more]
        ranks = [
            subprocess.Popen(
                [*(within[rank] if within else ()), *command], env=os.environ | shared | {"RANK": str(rank)}
            )
            for rank in range(workers)
        ]
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), f"ranks ended with {codes}"
        rows: list[Row] = json.loads(Path(folder, "rows").read_text())
        return rows


def join() -> int:
    """Joins the group of all ranks, and returns their number."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ["BENCH_FOLDER"] + "/store", workers)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(minutes=5))
    return workers


def answer(rows: Iterable[Row]) -> None:
    """Writes a rank's rows for the command that launched it, if the rank is 0, and leaves the group."""
    measured = list(rows)
    if os.environ["RANK"] == "0":
        Path(os.environ["BENCH_FOLDER"], "rows").write_text(json.dumps(measured))
    if dist.is_initialized():
        dist.destroy_process_group()


def turns(modes: dict[str, Callable[[], T]], repeats: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Returns what each mode returned in each repeat, without those that warm up. Every mode takes its turn in every
    repeat, so that what else the machine does disturbs all alike."""
    measured: dict[str, list[T]] = {name: [] for name in modes}
    for _ in range(warm_up + repeats):
        for name, mode in modes.items():
            measured[name].append(mode())
    return {name: each[warm_up:] for name, each in measured.items()}


def seconds_of(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    run()
    return clock() - began


def report(rows: Iterable[Row], columns: dict[str, str], out: Path | None) -> None:
    """Prints each row at once as a line of a Markdown table, and writes all of them to `out` as JSON. A column is a
    title and the format of its value."""
    print("|", " | ".join(columns), "|", flush=True)
    print("|---" * len(columns) + "|", flush=True)
    measured = []
    for row in rows:
        measured.append(row)
        print("|", " | ".join(columns.values()).format(**row), "|", flush=True)
    if out:
        out.write_text(json.dumps(measured, indent=1) + "\n")
