"""A UNet like SDXL's, undivided and by rows on two CPU ranks of one thread each: seconds of CPU that a rank spends, to
which what else the machine does counts little, and seconds on the clock.

    python -m tests.bench.unet_rows [--width 96] [--side 128] [--repeats 3] [--json out.json]

In ComfyUI's python. Width is the channels of the first level, side the rows and columns of the latent. Of the repeats
the best counts.
"""

from __future__ import annotations

import argparse
import time

import torch

from parallel_runtime.architectures import architecture_of
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.parallelize import parallelize
from parallel_runtime.specs import Parallelism

from ..rows.ranks import divide
from ..zoo import row_calls, tiny
from . import harness

COLUMNS = {"mode": "{mode}", "CPU s a rank": "{cpu_seconds:.3f}", "share of undivided": "{share:.2f}",
           "s": "{seconds:.3f}", "times as fast": "{faster:.2f}"}  # fmt: skip
DIVISIONS = {"undivided": (1, 1), "ring 2": (2, 1), "Ulysses 2": (1, 2)}


def main() -> None:
    options = harness.options(__doc__, width=96, side=128, repeats=3)
    if harness.is_rank():
        harness.answer(_rows(options))
    else:
        harness.report(harness.launch("unet_rows", in_comfyui=True), COLUMNS, options.json)


def _rows(options: argparse.Namespace) -> list[harness.Row]:
    torch.set_num_threads(1)
    tiny.start_comfyui()
    network = tiny.make("SDXL", model_channels=options.width, num_head_channels=32, context_dim=64)
    given = row_calls.unet("SDXL", options.side, options.side, context=64)
    rows: list[harness.Row] = []

    def forward() -> tuple[float, float]:
        cpu, wall = time.process_time(), time.monotonic()
        network(**given, transformer_options={})
        return time.process_time() - cpu, time.monotonic() - wall

    for mode, (ring, ulysses) in DIVISIONS.items():
        degrees = Parallelism(ring_degree=ring, ulysses_degree=ulysses)

        def work(rank: int, degrees: Parallelism = degrees) -> list[tuple[float, float]]:
            if degrees.world_size > 1:
                known = architecture_of(network)
                assert known is not None
                parallelize(network, known.plan, build_mesh(degrees), degrees)
            return harness.turns({"forward": forward}, options.repeats)["forward"]

        answers = divide(ring * ulysses, work)
        cpu, wall = (max(min(times[at] for times in answer) for answer in answers) for at in (0, 1))
        undivided = rows[0] if rows else {"cpu_seconds": cpu, "seconds": wall}
        rows.append({"mode": mode, "cpu_seconds": cpu, "share": cpu / undivided["cpu_seconds"], "seconds": wall,
                     "faster": undivided["seconds"] / wall})  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
