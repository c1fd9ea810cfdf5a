"""How a part of the report measures: it yields Cases, and each becomes a Measurement, with its labels. A failure is one
too. A time is the device's by its events, and the host's until its last launch has returned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel_runtime.commands import report
from parallel_runtime.commands.report import Measurement
from parallel_runtime.engine import graph_runner
from parallel_runtime.engine.comm.ranks import event_factory, seconds_between
from parallel_runtime.errors import ParallelError
from parallel_runtime.specs import ComfySetup

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, ParallelError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
ERRORS = ("error", "alone")
REMAINING_CASES = "the rest of this part"
WORDS = 300  # characters of a failure
LONG_SECONDS = 0.5  # a run that takes longer is repeated less
GIB = 2**30
NO_GRAPHS = "no CUDA graphs here"
NEEDS_CUDA = "needs a CUDA GPU"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of one part. `world_size` ranks have a GPU each, or all of them the first one (`one_card`, where
    times mean nothing). `comfyui` is a checkout, "" for none. `registered`: NCCL registers recorded buffers, its
    default, which workers turn off. `subject`: the file that `networks check` checks, and its checkout. On the CPU
    networks are tiny."""

    kind: str = "cuda"
    world_size: int = 1
    one_card: bool = False
    registered: bool = False
    comfyui: str = ""
    tokens: int = 4608
    subject: tuple[str, ...] = ()

    @property
    def tiny(self) -> bool:
        return self.kind == "cpu"

    @property
    def comfy(self) -> ComfySetup:
        flags = ("--cpu", "--use-pytorch-cross-attention") if self.tiny else ()
        return ComfySetup(root=self.comfyui, flags=flags, folder=self.comfyui)

    @property
    def devices(self) -> tuple[str, ...]:
        """Returns the device of each rank."""
        numbers = (0 if self.one_card else rank for rank in range(self.world_size))
        return tuple("cpu" if self.tiny else f"{self.kind}:{number}" for number in numbers)


class Case(NamedTuple):
    """The labels of a measurement, a function that measures it, one that times it if no rank has failed, and the
    context in which both are called."""

    labels: Measurement
    measure: Callable[[], Measurement]
    clock: Callable[[], Measurement] | None = None
    within: Callable[[], AbstractContextManager[None]] = nullcontext


def measurement_of(case: Case) -> Measurement:
    """Returns the complete measurement over all ranks. Collective."""
    with ExitStack() as context:

        def measure() -> Measurement:
            context.enter_context(case.within())
            return case.measure()

        measurement = of_all_ranks(case.labels | _measured_or_failure(measure))
        if case.clock is None or "failed" in measurement:
            return measurement
        return of_all_ranks(measurement | _measured_or_failure(case.clock))


def _measured_or_failure(act: Callable[[], Measurement]) -> Measurement:
    try:
        return act()
    except FAILURES as failure:
        return {"failed": in_words(failure)}


def unbroken(what: Measurement, cases: Iterator[Case]) -> Iterator[Case]:
    """Yields these cases; if the code between them fails, a failed case in place of the remaining ones."""
    try:
        yield from cases
    except FAILURES as failure:
        words = in_words(failure)
        yield Case(what, lambda: {"failed": words})


def of_all_ranks(measurement: Measurement) -> Measurement:
    """Returns the measurement with the largest errors of all ranks, or a failed one if any rank failed. Collective."""
    if not distributed():
        return measurement
    failed, *errors = largest("failed" in measurement, *(measurement.get(name, 0.0) for name in ERRORS))
    if failed:
        labels = {name: value for name, value in measurement.items() if name not in ERRORS}
        return {"failed": "on another rank"} | labels
    return measurement | {name: error for name, error in zip(ERRORS, errors, strict=True) if name in measurement}


def largest(*numbers: float) -> list[float]:
    """Returns the maximum of each number over the ranks. Collective."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if distributed():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def distributed() -> bool:
    """Are there other ranks that communicate (not the fake backend)?"""
    return dist.is_initialized() and dist.get_backend() != "fake"


def in_words(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:WORDS]


def mean_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the mean difference, in standard deviations of the exact result."""
    assert not out.isnan().any(), "NaN"
    return report.mean_error(out, exact)


class Clock:
    """Measures one run in its modes, and how much faster each is than the very first one."""

    def __init__(self, run: Callable[[], Any], device: torch.device) -> None:
        self.run, self._device = run, device
        self._alone = 0.0

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
    """Returns ms, host_ms and the peak of memory in GiB: medians of some runs after one that warms up. Collective where
    there is a group, whose ranks begin together."""
    (slowest,) = largest(_once(run, device)[0])  # so that all repeat alike
    rounds = 2 if slowest > 1e3 * LONG_SECONDS else 5
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    times = [_once(run, device) for _ in range(rounds)]
    ms, host_ms = (statistics.median(column) for column in zip(*times, strict=True))
    measurement = {"ms": ms, "host_ms": host_ms}
    return measurement if device.type == "cpu" else measurement | {"gib": torch.cuda.max_memory_allocated(device) / GIB}


def _once(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Returns the device's milliseconds, and the host's until its last launch has returned."""
    make_event = event_factory(device)
    if distributed():
        dist.barrier()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    started, begin = time.perf_counter(), make_event()
    run()
    host_seconds, end = time.perf_counter() - started, make_event()
    end.synchronize()
    return 1e3 * seconds_between(begin, end), 1e3 * host_seconds
