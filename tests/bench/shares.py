"""A step of workers of which the last one's blocks take twice as long: by equal shares, by auto's, and the ideal.

    python -m tests.bench.shares [--workers 2] [--repeats 4] [--ulysses] [--json out.json]

Blocks take a time for each token, so that workers do not take the CPU from each other. Ideal is what all would need for
a step if each computed all of the time, at the speed that it showed by equal shares.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ModelSpec, Parallelism

from ..groups import faulty, flux_job, on_cpu, spec_of
from ..zoo import checkpoints
from . import harness

STEPS = 4
COLUMNS = {"run": "{mode}", "shares": "{shares}", "s a step": "{step:.3f}", "of the ideal": "{ideals:.2f}"}


def main() -> None:
    options = harness.options(__doc__, workers=2, repeats=4, ulysses=False)
    paces = ["pace"] * (options.workers - 1) + ["slow"]
    os.environ.update(faulty(";".join(f"{rank} tokens {pace}" for rank, pace in enumerate(paces))))
    degrees = Parallelism(**{f"{'ulysses' if options.ulysses else 'ring'}_degree": options.workers})
    with tempfile.TemporaryDirectory() as folder:
        rows = _rows(spec_of(checkpoints.write(Path(folder), "flux_schnell")), degrees, options.repeats)
    harness.report(rows, COLUMNS, options.json)


def _rows(model: ModelSpec, degrees: Parallelism, repeats: int) -> list[dict[str, Any]]:
    """Equal shares before and after those of auto, repeat by repeat."""
    measured: list[tuple[str, Parallelism, float]] = []
    with WorkerGroup(on_cpu(degrees)) as group:

        def step(mode: str, by: Parallelism) -> float:
            result = group.run(model, by, flux_job(steps=STEPS, size=(12, 8), tokens=6))
            measured.append((mode, by, result.seconds / STEPS))
            computed = [each.computed_seconds for each in group.readings]
            return len(computed) / sum(1 / seconds for seconds in computed if seconds)

        equal = replace(degrees, shares=(1,) * degrees.world_size)
        ideal = step("equal", equal)  # of ranks that did as much each: the harmonic mean of their times
        for number in range(repeats):
            auto = replace(degrees, shares=group.balance.shares(model).get(degrees, ()))
            group.balance.begin(model, auto)
            step(f"auto {number + 1}", auto)
        step("equal", equal)
    return [
        {"mode": mode, "shares": ",".join(map(str, by.shares)) or "none", "step": seconds, "ideals": seconds / ideal}
        for mode, by, seconds in measured
    ]


if __name__ == "__main__":
    main()
