"""Jobs for two machines, and something that happens in the middle of one."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ModelSpec, Parallelism

from ..groups import flux_job


def samples(group: WorkerGroup, model: ModelSpec, parallelism: Parallelism, **job: object) -> Tensor:
    return group.run(model, parallelism, flux_job(**job)).value["samples"]  # type: ignore[arg-type]


def difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.std()).item()


class Once:
    """Does something at the first step, and remembers when."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self.at = 0.0

    def __call__(self, *_: object) -> None:
        if not self.at:
            self.at = time.monotonic()
            self._action()
