"""What a group of workers costs around the model: its start, and a request to it when it is warm.

    python -m tests.bench.group [--workers 1 2 4] [--requests 50] [--json out.json]

Start: until every rank has ComfyUI imported and has found the others, beside the time that one Python takes alone to
import torch and ComfyUI. Request: wall time minus what rank 0 spent on it, for a demo model of a few milliseconds, so
that what is left is the way there and back. Without a ComfyUI the start is that of workers without one.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ComfySetup, Parallelism

from ..comfyui.comfy import find_comfy
from ..groups import flux_job, on_cpu, spec_of
from ..zoo import checkpoints

log = logging.getLogger(__name__)

IMPORT = """
import sys
sys.path.insert(0, {root!r})
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch, comfy.sd, comfy.samplers
"""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    comfy = find_comfy()
    setup = ComfySetup(root=str(comfy.root), flags=("--cpu",), folder=str(comfy.root), version="") if comfy else None
    script = IMPORT.format(root=setup.root) if setup else "import torch"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(checkpoints.write(Path(folder), "flux_schnell"))
        for workers in options.workers:
            parallelism = Parallelism(ring_degree=workers)
            alone, starts, waits = [], [], []
            for _ in range(options.starts):
                started = time.perf_counter()
                subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
                alone.append(time.perf_counter() - started)
                started = time.perf_counter()
                with WorkerGroup(on_cpu(parallelism), setup) as group:
                    starts.append(time.perf_counter() - started)
                    waits = _requests(group, spec, parallelism, options.requests)
            rows.append(_row(workers, alone, starts, waits))
    _report(rows, options.json)
    return 0


def _requests(group: WorkerGroup, spec: Any, parallelism: Parallelism, count: int) -> list[float]:
    waits = []
    for seed in range(count + 1):
        job = flux_job(seed=seed, steps=2)
        started = time.perf_counter()
        result = group.run(spec, parallelism, job)
        waits.append(time.perf_counter() - started - result.seconds - result.load_seconds)
    return waits[1:]  # the first one loads


def _row(workers: int, alone: list[float], starts: list[float], waits: list[float]) -> dict[str, Any]:
    return {
        "workers": workers,
        "import_s": statistics.median(alone),
        "start_s": statistics.median(starts),
        "request_ms": 1e3 * statistics.median(waits),
        "worst_ms": 1e3 * max(waits),
    }


def _report(rows: list[dict[str, Any]], path: Path | None) -> None:
    log.info("%-8s %9s %9s %6s %11s %9s", "workers", "import s", "start s", "times", "request ms", "worst ms")
    for row in rows:
        times = row["start_s"] / row["import_s"]
        log.info("%(workers)-8d %(import_s)9.2f %(start_s)9.2f %(times)6.2f %(request_ms)11.1f %(worst_ms)9.1f",
                 row | {"times": times})  # fmt: skip
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
