"""How long a run takes: the device by its events, the host until its last launch has returned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...engine.graphs import graph_runner
from .cases import Case, Measurement, distributed, largest

LONG_SECONDS = 0.5  # a run that takes longer is repeated less
GIB = 2**30
NO_GRAPHS = "no CUDA graphs here"
NEEDS_CUDA = "needs a CUDA GPU"


class Clock:
    """Measures one run in its modes, and how much faster each is than the very first one."""

    def __init__(self, run: Callable[[], Any], device: torch.device) -> None:
        self.run, self._device = run, device
        self._alone = 0.0

    def cases(self, labels: Measurement) -> Iterator[Case]:
        yield Case(labels | {"mode": "eager"}, self.eager)
        yield Case(labels | {"mode": "recorded"}, self.recorded)

    def eager(self) -> Measurement:
        return self._measured(self.run)

    def recorded(self) -> Measurement:
        """Measures a replay of the run, recorded as workers do it but without the copies of its inputs and output."""
        recorder = graph_runner.cuda_graphs.recorder_for(self._device)
        if recorder is None:
            return {"note": NO_GRAPHS}
        recorder.warm_up(self.run)
        graph = recorder.record(self.run)
        return self._measured(graph.replay) | {"graph_gib": graph.nbytes / GIB}

    def _measured(self, run: Callable[[], Any]) -> Measurement:
        times = clocked(run, self._device)
        self._alone = self._alone or times["ms"]
        return times | {"faster": self._alone / times["ms"]}


def clocked(run: Callable[[], Any], device: torch.device) -> Measurement:
    """ms, host_ms and the peak of memory in GiB: medians of some runs after one that warms up. Collective where there
    is a group, whose ranks begin together."""
    (slowest,) = largest(_once(run, device)[0])  # so that all repeat alike
    rounds = 2 if slowest > 1e3 * LONG_SECONDS else 5
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    times = [_once(run, device) for _ in range(rounds)]
    ms, host_ms = (statistics.median(column) for column in zip(*times, strict=True))
    measurement = {"ms": ms, "host_ms": host_ms}
    return measurement if device.type == "cpu" else measurement | {"gib": torch.cuda.max_memory_allocated(device) / GIB}


def _once(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    if distributed():
        dist.barrier()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    if device.type == "cpu":
        run()
        return (took := 1e3 * (time.perf_counter() - started)), took
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    host = 1e3 * (time.perf_counter() - started)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), host
