"""Two ranks behind a cable of so many Mbit/s: a pipeline beside Ulysses, a ring and offload. Time, traffic, weights.

    python -m tests.bench.pipeline [--mbit 1000 100] [--repeats 3] [--pixels 64] [--json out.json]

ComfyUI's FLUX, small, in ComfyUI's python, one thread a rank; each rank in a network namespace of its own (root). Every
mode takes its turn in every repeat. Seconds are of one evaluation, where so many follow each other.
"""

from __future__ import annotations

import statistics
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parallel_runtime.specs import Parallelism

from ..machines.network import network
from . import harness

if TYPE_CHECKING:  # ComfyUI's arguments are parsed there
    from ..architectures.pipeline_modes import Mode

SIZE = {"hidden_size": 512, "num_heads": 8, "depth": 4, "depth_single_blocks": 8, "axes_dim": [16, 24, 24]}
TEXT = 64  # tokens
DEGREES = {
    "Ulysses 2": Parallelism(ulysses_degree=2),
    "ring 2": Parallelism(ring_degree=2),
    "pipeline 2": Parallelism(pipeline_degree=2),
}
FLIGHTS = {"pipeline 2": (1, 2, 4)}
COLUMNS = {"Mbit/s": "{mbit}", "mode": "{mode}", "in flight": "{flights}", "s an evaluation": "{seconds:.3f}",
           "MB rank 0 sends": "{sent:.2f}", "its weights": "{held:.2f}", "error": "{error:.0e}"}  # fmt: skip


def main() -> None:
    options = harness.options(__doc__, mbit=[1000, 100], repeats=3, pixels=64)
    if harness.is_rank():
        harness.answer(_rows(options.repeats, options.pixels))
    else:
        rows = (row | {"mbit": mbit} for mbit in options.mbit for row in _behind(mbit))
        harness.report(rows, COLUMNS, options.json)


def _behind(mbit: int) -> list[harness.Row]:
    """What rank 0 measured behind such a cable."""
    with network() as two:
        for side in (two.first, two.second):
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "1s"]
            subprocess.run(["tc", "-n", side, "qdisc", "add", "dev", "cable", "root", *limit], check=True)
        within = [["ip", "netns", "exec", side] for side in (two.first, two.second)]
        return harness.launch("pipeline", workers=2, in_comfyui=True, within=within, interface="cable")


@torch.inference_mode()
def _rows(repeats: int, pixels: int) -> list[harness.Row]:
    harness.join()
    from ..architectures.pipeline_modes import modes

    measured = [
        (mode, flights) for mode in modes(SIZE, DEGREES, pixels, TEXT) for flights in FLIGHTS.get(mode.name, (1,))
    ]
    turns = {f"{mode.name}, {flights}": partial(_evaluated, mode, flights) for mode, flights in measured}
    answers = harness.turns(turns, repeats).values()
    return [
        {"mode": mode.name, "flights": flights, "seconds": statistics.median(seconds for seconds, _ in answer),
         "sent": answer[-1][1], "held": mode.weight_share, "error": mode.error}
        for (mode, flights), answer in zip(measured, answers, strict=True)
    ]  # fmt: skip


def _evaluated(mode: Mode, flights: int) -> tuple[float, float]:
    """The seconds of an evaluation and the MB that this rank sent for it, where so many follow each other."""

    def run() -> None:
        mode.run(flights)
        dist.barrier()

    with mode.on():
        before = _sent()
        dist.barrier()
        seconds = harness.seconds_of(run)
        return seconds / flights, (_sent() - before) / flights / 1e6


def _sent() -> int:
    """Bytes through this end of the cable."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "cable:" in line)
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    main()
