"""A UNet like SDXL's, undivided and by rows on two CPU ranks of one thread each: seconds of CPU that a rank spends, to
which what else the machine does counts little, and seconds on the clock.

    COMFYUI_PATH=... COMFYUI/.venv/bin/python -m tests.bench.unet_rows [--width 96] [--side 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel_runtime.architectures import architecture_of
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.rows.parallel_rows import parallelize_rows
from parallel_runtime.specs import Parallelism

from ..rows.ranks import divide
from ..zoo import row_calls, tiny

ROUNDS = 4
DIVISIONS = {"undivided": (1, 1), "ring 2": (2, 1), "Ulysses 2": (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.unet_rows", description=__doc__)
    parser.add_argument("--width", type=int, default=96, help="channels of the first level")
    parser.add_argument("--side", type=int, default=128, help="rows and columns of the latent")
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tiny.start_comfyui()
    network = tiny.make("SDXL", model_channels=asked.width, num_head_channels=32, context_dim=64)
    given, rows = row_calls.unet("SDXL", asked.side, asked.side, context=64), []
    for mode, (ring, ulysses) in DIVISIONS.items():
        degrees = Parallelism(ring_degree=ring, ulysses_degree=ulysses)

        def work(rank: int, degrees: Parallelism = degrees) -> tuple[float, float]:
            if degrees.world_size > 1:
                known = architecture_of(network)
                assert known is not None
                parallelize_rows(network, known.plan, build_mesh(degrees), degrees)  # type: ignore[arg-type]
            return _best(lambda: network(**given, transformer_options={}))

        answers = divide(ring * ulysses, work)
        cpu, wall = (max(answer[at] for answer in answers) for at in (0, 1))
        rows.append({"mode": mode, "cpu_seconds": cpu, "seconds": wall})
        print(
            f"{mode:10} {cpu:.3f} s of CPU a rank ({cpu / rows[0]['cpu_seconds']:.2f}), {wall:.3f} s "
            f"({rows[0]['seconds'] / wall:.2f} times as fast)",
            flush=True,
        )
    if asked.json:
        with open(asked.json, "w") as out:
            json.dump(rows, out)


def _best(run: Callable[[], Tensor]) -> tuple[Any, ...]:
    """(seconds of this process's CPU, seconds on the clock), each of the best round."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time(), time.monotonic()
        run()
        times.append((time.process_time() - began[0], time.monotonic() - began[1]))
    return tuple(map(min, zip(*times[1:], strict=True)))


if __name__ == "__main__":
    main()
