"""A step of workers of which the last one's blocks take twice as long: by equal shares, by auto's, and the ideal.

    python -m tests.bench.shares [--workers 2] [--runs 4] [--ulysses] [--json out.json]

Blocks take a time for each token, so that workers do not take the CPU from each other. Ideal is what all would need for
a step if each computed all of the time, at the speed that it showed by equal shares.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ModelSpec, Parallelism

from ..groups import faulty, flux_job, on_cpu, spec_of
from ..zoo import checkpoints

log = logging.getLogger(__name__)

STEPS = 4


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    paces = ["pace"] * (options.workers - 1) + ["slow"]
    os.environ.update(faulty(";".join(f"{rank} tokens {pace}" for rank, pace in enumerate(paces))))
    degrees = Parallelism(**{f"{'ulysses' if options.ulysses else 'ring'}_degree": options.workers})
    with tempfile.TemporaryDirectory() as folder:
        rows = _rows(spec_of(checkpoints.write(Path(folder), "flux_schnell")), degrees, options.runs)
    for row in rows:
        log.info("%-9s %-14s %6.3f s a step, %.2f of the ideal", row["mode"], row["shares"], row["step"], row["ideals"])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def _rows(model: ModelSpec, degrees: Parallelism, runs: int) -> list[dict[str, Any]]:
    """Equal shares before and after those of auto, run by run."""
    measured: list[tuple[str, Parallelism, float]] = []
    with WorkerGroup(on_cpu(degrees)) as group:

        def step(mode: str, by: Parallelism) -> float:
            result = group.run(model, by, flux_job(steps=STEPS, size=(12, 8), tokens=6))
            measured.append((mode, by, result.seconds / STEPS))
            computed = [each.computed_seconds for each in group.readings]
            return len(computed) / sum(1 / seconds for seconds in computed if seconds)

        equal = replace(degrees, shares=(1,) * degrees.world_size)
        ideal = step("equal", equal)  # of ranks that did as much each: the harmonic mean of their times
        for number in range(runs):
            auto = replace(degrees, shares=group.balance.shares(model).get(degrees, ()))
            group.balance.begin(model, auto)
            step(f"auto {number + 1}", auto)
        step("equal", equal)
    return [
        {"mode": mode, "shares": ",".join(map(str, by.shares)) or "none", "step": seconds, "ideals": seconds / ideal}
        for mode, by, seconds in measured
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--ulysses", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
