"""The report's worker group: how long it takes to start, to sample, to cancel, and to tell of a killed rank.

    python -m tests.gpu.report_group --launch 2 --device cuda --out FILE

The demo's model, which comes with the pack; the group is the very one that ComfyUI's process has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.demo import MODEL
from parallel_runtime.demo.sample import conditions
from parallel_runtime.demo.words import encode
from parallel_runtime.errors import WorkerDied
from parallel_runtime.host.group import WorkerGroup
from parallel_runtime.jobs import DemoJob
from parallel_runtime.specs import ModelSpec, Parallelism, Placement

from ..groups import spec_of, workers_of

Row = dict[str, Any]


class Enough(BaseException):
    """The user's cancel."""


class Clock:
    """What took how long."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._last = time.monotonic()

    def lap(self, what: str) -> None:
        now = time.monotonic()
        self.rows.append({"what": what, "seconds": now - self._last})
        self._last = time.monotonic()


def main() -> int:
    options = _options()
    kinds = [f"{options.device}:{index}" if options.device != "cpu" else "cpu" for index in range(options.launch)]
    options.out.write_text(json.dumps(_measured(Placement(devices=tuple(kinds)))))
    return 0


def _measured(placement: Placement) -> list[Row]:
    parallelism, spec, clock = Parallelism(ring_degree=placement.world_size), spec_of(MODEL), Clock()
    with WorkerGroup(placement) as group:
        clock.lap("start of the group")
        first = group.sample(spec, parallelism, _job(4)).value["samples"]
        clock.lap("first run, with loading")
        group.sample(spec, parallelism, _job(4))
        clock.lap("the same, warm")
        _end_by(group, spec, parallelism, _cancel, Enough)
        clock.lap("run that is cancelled in its first steps")
        same = group.sample(spec, parallelism, _job(4)).value["samples"]
        assert torch.equal(first, same), "the run after a cancel differs"
        clock.lap("run after it")
        _end_by(group, spec, parallelism, partial(os.kill, workers_of(group)[-1], signal.SIGKILL), WorkerDied)
        clock.lap("run in which a rank is killed, until it is told")
    with WorkerGroup(placement) as group:
        again = group.sample(spec, parallelism, _job(4)).value["samples"]
    assert torch.equal(first, again), "the run after a death differs"
    clock.lap("start of another group, and a run")
    return clock.rows


def _cancel() -> None:
    raise Enough


def _end_by(
    group: WorkerGroup,
    spec: ModelSpec,
    parallelism: Parallelism,
    act: Callable[[], None],
    expected: type[BaseException],
) -> None:
    """A long run in whose first step somebody acts, which ends it."""

    def on_step(step: int, *_: Any) -> None:
        if step == 0:
            act()

    try:
        group.sample(spec, parallelism, _job(2000), on_step=on_step)
    except expected:
        return
    raise AssertionError(f"the run was not ended by {expected.__name__}")


def _job(steps: int) -> DemoJob:
    noise = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    told, untold = (conditions(*encode(prompt)) for prompt in ("a red circle on a white background", ""))
    return DemoJob(noise=noise, sigmas=torch.linspace(1, 0, steps + 1), cfg=2.0, positive=told, negative=untold)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
