"""Two ranks behind a cable of so many Mbit/s: a pipeline beside Ulysses, a ring and offload. Time, traffic, weights.

    python -m tests.bench.pipeline [--mbit 1000 100] [--rounds 3] [--json out.json]

ComfyUI's FLUX, small, in ComfyUI's python, one thread a rank; each rank in a network namespace of its own (root). Every
mode takes its turn in every round. Seconds are of one evaluation, where so many follow each other.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.specs import Parallelism

from ..comfyui.comfy import find_comfy
from ..machines.network import network
from .launch import is_rank, join

log = logging.getLogger(__name__)

SIZE = {"hidden_size": 512, "num_heads": 8, "depth": 4, "depth_single_blocks": 8, "axes_dim": [16, 24, 24]}
PIXELS, TEXT = 64, 64  # of the latent's sides; tokens
DEGREES = {
    "Ulysses 2": Parallelism(ulysses_degree=2),
    "ring 2": Parallelism(ring_degree=2),
    "pipeline 2": Parallelism(pipeline_degree=2),
}
FLIGHTS = {"pipeline 2": (1, 2, 4)}
Answer = dict[str, Any]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=PIXELS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if is_rank():
        return _rank(options)
    rows = [row | {"mbit": mbit} for mbit in options.mbit for row in _behind(mbit, options)]
    log.info("| Mbit/s | mode | in flight | s an evaluation | MB rank 0 sends | its weights | error |")
    log.info("|---|---|---|---|---|---|---|")
    for row in rows:
        log.info(
            "| {mbit} | {mode} | {flights} | {seconds:.3f} | {sent:.2f} | {held:.2f} | {error:.0e} |".format(**row)
        )
    if options.json:
        options.json.write_text(json.dumps(rows))
    return 0


def _behind(mbit: int, options: argparse.Namespace) -> list[Answer]:
    """What rank 0 measured behind such a cable."""
    comfy = find_comfy()
    assert comfy is not None
    with tempfile.TemporaryDirectory() as folder, network() as two:
        for side in (two.first, two.second):
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "1s"]
            subprocess.run(["tc", "-n", side, "qdisc", "add", "dev", "cable", "root", *limit], check=True)
        shared = {"BENCH_STORE": f"{folder}/store", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "cable"}
        shared |= {"COMFYUI_PATH": str(comfy.root), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        arguments = ["--rounds", str(options.rounds), "--pixels", str(options.pixels), "--json", f"{folder}/out"]
        command = [str(comfy.python), "-m", "tests.bench.pipeline", *arguments]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", side, *command], env=os.environ | shared | {"RANK": str(rank)})
            for rank, side in enumerate((two.first, two.second))
        ]
        assert not any([rank.wait() for rank in ranks])
        answer: list[Answer] = json.loads(Path(f"{folder}/out").read_text())
        return answer


def _rank(options: argparse.Namespace) -> int:
    os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    rank, _ = join()
    from ..architectures.pipeline_modes import Mode, modes  # ComfyUI's arguments are parsed there

    with torch.inference_mode():
        cases: list[tuple[str, int, Mode]] = [
            (mode.name, flights, mode)
            for mode in modes(SIZE, DEGREES, options.pixels, TEXT)
            for flights in FLIGHTS.get(mode.name, (1,))
        ]
        seconds: dict[tuple[str, int], list[float]] = {(name, flights): [] for name, flights, _ in cases}
        sent: dict[tuple[str, int], float] = {}
        for turn in range(options.rounds + 1):
            for name, flights, mode in cases:
                with mode.on():
                    before = _sent()
                    taken = _timed(lambda mode=mode, flights=flights: mode.run(flights)) / flights  # type: ignore[misc]
                    sent[name, flights] = (_sent() - before) / flights / 1e6
                if turn:
                    seconds[name, flights].append(taken)
    rows = [
        {"mode": name, "flights": flights, "seconds": statistics.median(seconds[name, flights]),
         "sent": sent[name, flights], "held": mode.weight_share, "error": mode.error}
        for name, flights, mode in cases
    ]  # fmt: skip
    if rank == 0:
        options.json.write_text(json.dumps(rows))
    dist.destroy_process_group()
    return 0


def _timed(run: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - began


def _sent() -> int:
    """Bytes through this end of the cable."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "cable:" in line)
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    sys.exit(main())
