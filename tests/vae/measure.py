"""Time, memory and traffic of one decode or encode on so many ranks of one thread each, in ComfyUI's python:
`python -m tests.vae.measure COMFYUI NAME METHOD LATENT RANKS...` prints a line of JSON for each number of ranks.

Peak: the most that a rank's process held during the run, less what it held before. `overhead` is what a torch function
that is not divided costs more under the mode, in seconds of host time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is given back, and does not count

import torch
import torch.distributed as dist

from .ranks import divide

CALLS = 20_000


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def measure(name: str, method: str, latent: tuple[int, ...], world: int) -> dict[str, Any]:
    from parallel_runtime.autoencoders import COMPARED, kind_of
    from parallel_runtime.worker.engine import exchange
    from parallel_runtime.worker.engine.mesh import first_ranks
    from parallel_runtime.worker.vae.converting import Conversion, share_of

    from . import zoo

    model = zoo.random_weights(zoo.CASES[name].make())
    unit, over_time = 1 if method == "decode" else zoo.CASES[name].ratio, COMPARED[kind_of(model)].over_time
    x = torch.randn(latent, generator=torch.Generator().manual_seed(1))

    def work(rank: int) -> dict[str, float]:
        start, sent = exchange._start, []

        def counted(operations: list[Any]) -> list[Any]:
            sent.append(sum(op.tensor.nbytes for op in operations if op.op is dist.isend))
            return start(operations)

        exchange._start = counted
        share = share_of(x, unit, first_ranks(world, torch.device("cpu")))
        work = Conversion(model, method, x.device, unit, over_time)
        work.run(x[..., : 2 * world * unit, : 2 * world * unit], _small(share, world))
        dist.barrier()
        sent.clear()
        Path("/proc/self/clear_refs").write_text("5")
        before, wall, cpu = status("VmRSS"), time.perf_counter(), time.thread_time()
        made = work.run(x, share)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        assert made.isfinite().all()
        return {"wall": wall, "cpu": cpu, "peak": status("VmHWM") - before, "sent": sum(sent), "exchanges": len(sent)}

    ranks = divide(world, work)
    return {"name": name, "ranks": world, **{key: max(rank[key] for rank in ranks) for key in ranks[0]}}


def overhead() -> float:
    from parallel_runtime.worker.engine.mesh import Axis
    from parallel_runtime.worker.vae.dividing import Rows
    from parallel_runtime.worker.vae.share import Share

    x = torch.randn(1, 8, 1, 4)

    def seconds() -> float:
        started = time.thread_time()
        for _ in range(CALLS):
            x + x
        return (time.thread_time() - started) / CALLS

    with torch.inference_mode():
        plain = seconds()
        with Rows(Share(ranks=Axis(), dim=-2, units=(1,))):
            return seconds() - plain


def _small(share: Any, world: int) -> Any:
    from parallel_runtime.worker.vae.share import Share

    return Share(ranks=share.ranks, dim=share.dim, units=(2,) * world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.append(sys.argv[1])
    name, method, latent, *numbers = sys.argv[2:]
    sys.argv[1:] = ["--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    sizes = tuple(int(size) for size in latent.split(","))
    for number in numbers:
        print(json.dumps({**measure(name, method, sizes, int(number)), "overhead": overhead()}), flush=True)
