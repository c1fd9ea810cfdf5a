"""What a group of workers costs around the model: its start, and a request to it when it is warm.

    python -m tests.bench.group [--workers 1 2 4] [--repeats 3] [--requests 50] [--json out.json]

Start: until every rank has ComfyUI imported and has found the others, beside the time that one Python takes alone to
import torch and ComfyUI. Request: wall time minus what rank 0 spent on it, for a demo model of a few milliseconds, so
that what is left is the way there and back. Without a ComfyUI the start is that of workers without one.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ComfySetup, ModelSpec, Parallelism

from ..comfyui.comfy import find_comfy
from ..groups import flux_job, on_cpu, spec_of
from ..zoo import checkpoints
from . import harness

COLUMNS = {"workers": "{workers}", "import of torch and ComfyUI alone, s": "{import_s:.2f}",
           "start of the group, s": "{start_s:.2f}", "times": "{times:.2f}",
           "a request beside the model, ms": "{request_ms:.1f}", "worst, ms": "{worst_ms:.1f}"}  # fmt: skip
IMPORT = """
import sys
sys.path.insert(0, {root!r})
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch, comfy.sd, comfy.samplers
"""


def main() -> None:
    options = harness.options(__doc__, workers=[1, 2, 4], repeats=3, requests=50)
    comfy = find_comfy()
    setup = ComfySetup(root=str(comfy.root), flags=("--cpu",), folder=str(comfy.root), version="") if comfy else None
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(checkpoints.write(Path(folder), "flux_schnell"))
        rows = (_row(workers, setup, spec, options.repeats, options.requests) for workers in options.workers)
        harness.report(rows, COLUMNS, options.json)


def _row(workers: int, setup: ComfySetup | None, spec: ModelSpec, repeats: int, requests: int) -> harness.Row:
    parallelism = Parallelism(ring_degree=workers)
    script = IMPORT.format(root=setup.root) if setup else "import torch"
    waits: list[float] = []

    def alone() -> float:
        command = [sys.executable, "-c", script]
        return harness.seconds_of(lambda: subprocess.run(command, check=True, capture_output=True))

    def start() -> float:
        began = time.perf_counter()
        with WorkerGroup(on_cpu(parallelism), setup) as group:
            seconds = time.perf_counter() - began
            waits[:] = [_wait(group, spec, parallelism, seed) for seed in range(requests + 1)][
                1:
            ]  # the first one loads
        return seconds

    measured = harness.turns({"alone": alone, "start": start}, repeats, warm_up=0)
    import_s, start_s = map(statistics.median, measured.values())
    return {"workers": workers, "import_s": import_s, "start_s": start_s, "times": start_s / import_s,
            "request_ms": 1e3 * statistics.median(waits), "worst_ms": 1e3 * max(waits)}  # fmt: skip


def _wait(group: WorkerGroup, spec: ModelSpec, parallelism: Parallelism, seed: int) -> float:
    job = flux_job(seed=seed, steps=2)
    began = time.perf_counter()
    result = group.run(spec, parallelism, job)
    return time.perf_counter() - began - result.seconds - result.load_seconds


if __name__ == "__main__":
    main()
