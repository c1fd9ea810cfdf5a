"""The worker group: how long it takes to start, to sample, to cancel, to free memory and to tell of a killed rank.

The demo's model, which comes with the pack; the group is the very one that ComfyUI's process has.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel_runtime.demo import spec
from parallel_runtime.demo.words_and_pictures import demo_job
from parallel_runtime.errors import WorkerDied
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.request import GraphsChoice
from parallel_runtime.specs import Parallelism, Placement

from .measuring import GIB, Case, Measurement, Setting

LONG = 2000  # steps of a run that somebody ends


class EndedByCaller(BaseException):
    """The user's cancel."""


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    trial = GroupRuns(Placement(devices=setting.devices))
    again = ("run after it, the same bits", trial.run)
    anew = (("start of another group", trial.start), ("run in it, the same bits", trial.run))
    steps = (
        ("start of the group", trial.start),
        ("first run, with loading", trial.run),
        ("the same, warm", trial.run),
        ("run that is cancelled in its first steps", partial(trial.end_first_step, trial.cancel, EndedByCaller)),
        again,
        ("run that is cancelled while it records", partial(trial.end_recording, trial.cancel, EndedByCaller)),
        again,
        ("Free memory", trial.free),
        again,
        ("run in which a rank is killed, until it is told", partial(trial.end_first_step, trial.kill, WorkerDied)),
        *anew,
        (
            "run in which a rank is killed while it records, until it is told",
            partial(trial.end_recording, trial.kill, WorkerDied),
        ),
        *anew,
    )
    try:
        for what, act in steps:
            yield Case({"what": what}, partial(trial.timed, act))
    finally:
        trial.end()


def memory_measurement(group: WorkerGroup) -> Measurement:
    """Returns the memory that any process uses of the fullest device; on the CPU that of the largest worker."""
    return {"gib": max(reading.used_bytes for reading in group.readings) / GIB} if group.readings else {}


class GroupRuns:
    """A group, and what a user does to it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._group: WorkerGroup | None = None
        self._first: Tensor | None = None

    @property
    def group(self) -> WorkerGroup:
        assert self._group is not None, "no group came up"
        return self._group

    def timed(self, act: Callable[[], Measurement | None]) -> Measurement:
        started = time.monotonic()
        more = act() or {}
        return {"seconds": time.monotonic() - started} | memory_measurement(self.group) | more

    def start(self) -> None:
        self.end()
        self._group = WorkerGroup(self._placement)

    def run(self) -> None:
        samples = self._sample(4)
        self._first = samples if self._first is None else self._first
        assert torch.equal(self._first, samples), "it differs from the first"

    def cancel(self) -> None:
        raise EndedByCaller

    def kill(self) -> None:
        os.kill(self.group.pids[-1], signal.SIGKILL)

    def free(self) -> None:
        self.group.free(spec())

    def end(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def end_first_step(self, act: Callable[[], None], expected: type[BaseException]) -> None:
        """Calls `act` in the first step of a long run, which raises what is expected."""
        with suppress(expected):
            self._sample(LONG, on_step=lambda step, *_: act() if step == 0 else None)
            raise AssertionError(f"the run was not ended by {expected.__name__}")

    def end_recording(self, act: Callable[[], None], expected: type[BaseException]) -> Measurement:
        """Calls `act` in a run as soon as a rank reports that it records."""

        def watch() -> None:
            if any(rank.busy == "recording" for rank in self.group.activity.now.ranks):
                act()

        with suppress(expected):
            self._sample(4, "on", watch=watch)
            return {"note": "nothing was recorded here, or too soon to be seen"}
        return {}

    def _sample(self, steps: int, cuda_graphs: GraphsChoice = "auto", **callbacks: Any) -> Tensor:
        noise = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
        job = demo_job("a red circle on a white background", noise, steps=steps, cfg=2.0)
        degrees = Parallelism(ring_degree=self._placement.world_size).with_options(cuda_graphs=cuda_graphs)
        samples: Tensor = self.group.run(spec(), degrees, job, **callbacks).value["samples"]
        return samples
