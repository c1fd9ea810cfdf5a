"""The last runs of this process: the phases of each, the seconds a step, and those on one worker. A lease opens the
record of its run and closes it; states of the group are its phases."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..request import EngineOptions
from ..specs import Parallelism, Placement
from .group_status import WORK, PastRun, Status

MAX_SPEEDUP_PER_WORKER = 1.2  # times as fast as one worker, for each worker: beyond that one of the runs was disturbed
HISTORY_LENGTH = 8  # runs, and kinds of work, that are kept
TIMED = {"starting", *WORK}

IN_ORDER = ("encoding", "sampling", "decoding")

LeasedFor = Literal["encoding", "sampling", "decoding", "prompt"]  # "encoding" and "decoding" are those of a VAE
Opener = Literal["start", "prompt", "lease"]  # "prompt": one is queued, whose lease has not begun


@dataclass(frozen=True)
class Size:
    """The size of a run: two runs with the same `key` take equally long on the same workers. `speedup` is the estimate
    against one worker, None if unknown; `tokens` are those of one image, 0 if unknown."""

    key: Hashable
    speedup: float | None = None
    tokens: int = 0


@dataclass(frozen=True)
class RunSetup:
    """How a run was divided: its `degrees`, without a Parallelism's other fields, and the kind of devices; several
    workers may be on one (`shared`). `patched`: by token patches, which one worker has not."""

    degrees: Parallelism = field(default_factory=Parallelism)
    kind: str = ""
    shared: bool = False
    patched: bool = False

    @classmethod
    def of(cls, degrees: Parallelism, placement: Placement) -> RunSetup:
        only = replace(degrees, stages=(), options=EngineOptions(), shares=())
        return cls(only, placement.device_kind, placement.shared, degrees.options.token_patches > 1)

    @property
    def workers(self) -> int:
        return self.degrees.world_size

    @property
    def single_worker(self) -> RunSetup:
        return RunSetup(kind=self.kind)

    def plausible_speedup(self, times: float | None) -> float | None:
        """Returns this speedup; None if it is implausible, devices are shared, or one worker gives another result."""
        believed = times is not None and self.workers > 1 and times <= MAX_SPEEDUP_PER_WORKER * self.workers
        return times if believed and not self.shared and not self.patched else None


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Measured seconds a step, when that was [epoch seconds], and the `speedup` against one worker if known."""

    setup: RunSetup
    seconds: float
    at: float = 0.0
    speedup: float | None = None


class History:
    """`runs` are the last ones, oldest first, with the open one. `size` and `sampler` are those of the current run,
    or of the next one: a step of one sampler may be several evaluations. `purpose`: why CP Plan runs a few steps."""

    def __init__(self) -> None:
        self.size = Size(None)
        self.sampler = ""
        self.purpose: Literal["", "measure", "compare"] = ""
        self._past: tuple[PastRun, ...] = ()
        self._open: PastRun | None = None
        self._opener: Opener = "start"
        self._phase: tuple[str, float] | None = None  # of the open run, and when it began, by time.monotonic
        self._asked: tuple[Hashable, str] = (None, "")  # the newest run's prompt, None if unknown, and purpose
        self._leases: tuple[LeasedFor, ...] = ()  # of the newest run
        self._last_status = Status()  # as the last step was done
        self._paces: dict[Hashable, dict[str, dict[RunSetup, Pace]]] = {}  # the fastest, by work and sampler
        self._first_steps: list[tuple[int, float]] = []  # the first two of the run that were reported, and their times

    @property
    def runs(self) -> tuple[PastRun, ...]:
        shown = self._open is not None and (self._open.phases or self._phase)
        return (*self._past, self._open) if self._open is not None and shown else self._past

    def expect(self) -> None:
        """A prompt is queued that will use the workers: a start that follows is a part of its run."""
        if self._open is None or self._opener == "start" or (self._opener == "prompt" and self._phase is None):
            self._begin("prompt")

    def expect_nobody(self) -> None:
        """The next start is for no prompt."""
        if self._open is not None and self._opener == "prompt":
            self._opener = "start"

    def open(self, work: LeasedFor, prompt: Hashable, model: str) -> bool:
        """Opens the record of a lease, and returns True; False for a lease in the middle of an open run. Of one prompt
        a VAE's encoding, sampling and decoding, in this order, are one run, and the texts are one."""
        if self._open is not None and self._opener == "lease":
            return False
        if self._open is None and self._can_go_on(work, prompt):
            *past, self._open = self._past
            self._past = tuple(past)
        elif self._opener != "prompt" or self._open is None:
            self._begin("lease")
        assert self._open is not None
        self._opener, self._asked, self._leases = "lease", (prompt, self.purpose), (*self._leases, work)
        measuring, comparing = self.purpose == "measure", self.purpose == "compare"
        model = self._open.model or model
        self._open = replace(self._open, model=model, end="", measuring=measuring, comparing=comparing)
        return True

    def close(self, how: str, reason: str = "") -> None:
        """The open run has ended."""
        self._end_phase(time.monotonic())
        run, self._open = self._open, None
        if run is None or not run.phases:
            return
        now = self._last_status
        sampled = how == "idle" and self._leases[-1:] == ("sampling",) and run.steps > 0
        # the last step may not have been reported
        self._append(replace(run, end=how, reason=reason, steps=now.steps if sampled else run.steps))
        if sampled and self.size.key is not None and run.step_seconds is not None:
            self._keep_pace(Pace(setup=_setup_of(now), seconds=run.step_seconds, at=run.began))

    def paces(self, key: Hashable) -> tuple[Pace, ...]:
        """Returns the paces of this work with its last sampler, fewest workers first; () for a single setup."""
        several = [paces for paces in self._paces.get(key, {}).values() if len(paces) > 1]
        paces = several[-1] if several else {}
        ordered = sorted(paces.values(), key=lambda pace: (pace.setup.workers, *pace.setup.degrees.by_name.values()))
        alone = [paces[one].seconds if (one := pace.setup.single_worker) in paces else math.inf for pace in ordered]
        times = [one.setup.plausible_speedup(on_one / one.seconds) for one, on_one in zip(ordered, alone, strict=True)]
        return tuple(replace(pace, speedup=speedup) for pace, speedup in zip(ordered, times, strict=True))

    def cost(self, key: Hashable, workers: Sequence[int], steps: int) -> float | None:
        """Estimates the seconds of `steps` by number of workers, with starting and loading; None for unknown work."""
        paces = [pace for paces in self._paces.get(key, {}).values() for pace in paces.values()]
        if not paces:
            return None
        on_one = min(pace.seconds * pace.setup.workers for pace in paces)
        before = max(sum(took for name, took in run.phases if name in ("starting", "loading")) for run in self.runs)
        return sum(before + steps * on_one / count for count in workers)

    def state_changed(self, now: Status) -> None:
        """The group's state is now another one: a phase of the open run ends, and perhaps the next one begins."""
        self._end_phase(now.began_at)
        if now.state == "starting" and self._open is None:
            self._begin("start")
        if self._open is None:
            return
        if now.state in TIMED:
            self._phase = now.state, now.began_at
        elif self._opener == "start" or (self._opener == "prompt" and self._open.phases and now.state != "idle"):
            self.close("idle" if now.state == "none" else now.state)
            return
        if now.placement is not None:
            workers, kind = now.placement.world_size, now.placement.device_kind
            self._open = replace(self._open, workers=workers, kind=kind)
        if now.state == "loading" and now.degrees is not None:
            self._first_steps = []
            self._open = replace(self._open, approximate=now.degrees.options.approximate)

    def step_done(self, now: Status, at: float) -> None:
        """Another step is done, `at` this time by time.monotonic."""
        # The pace leaves out the first step, and the second one too once there are more: workers that have just started
        # may record it, and a run on warm ones would look faster than what it is compared with.
        self._first_steps = [*self._first_steps, (now.step, at)][:2]
        if self._open is None:
            return
        first, began = max((step for step in self._first_steps if step[0] < now.step), default=(now.step, at))
        run, self._last_status = replace(self._open, tokens=self.size.tokens), now
        pace = (at - began) / (now.step - first) if now.step > first else run.step_seconds
        run = replace(run, steps=now.step, step_seconds=pace, waited=now.waited)
        self._open = self._with_single_worker(run, _setup_of(now))

    def refused(self, reason: str, at: float) -> None:
        """A run was refused for this reason. Another report of it, where it leaves the node, changes nothing."""
        if not any(run.reason is reason for run in self.runs):
            self._append(PastRun(began=at, end="refused", reason=reason))

    def _begin(self, opener: Opener) -> None:
        """Opens a record. Of a start that goes on it has what follows; another record that is open is over."""
        phase, now = self._phase, time.monotonic()
        self.close("idle")
        self._phase = (phase[0], now) if phase is not None else None
        self._open, self._opener, self._leases = PastRun(began=time.time()), opener, ()

    def _can_go_on(self, work: LeasedFor, prompt: Hashable) -> bool:
        """Is this lease the next part of the last run?"""
        leases = [*self._leases, work]
        if prompt is None or self._asked != (prompt, self.purpose) or not self._leases or not self._past:
            return False
        in_order = set(leases) <= {*IN_ORDER} and leases == sorted(leases, key=IN_ORDER.index)
        fits = set(leases) == {"prompt"} or (in_order and leases.count("sampling") <= 1)
        return fits and self._past[-1].end == "idle"

    def _end_phase(self, at: float) -> None:
        if self._open is not None and self._phase is not None:
            name, began = self._phase
            self._open = replace(self._open, phases=(*self._open.phases, (name, at - began)))
        self._phase = None

    def _with_single_worker(self, run: PastRun, setup: RunSetup) -> PastRun:
        """Adds one worker's seconds a step: measured with this sampler, else scaled from another, else estimated."""
        if run.step_seconds is None or run.workers == 1:
            return run
        paces = self._paces.get(self.size.key, {})
        own = paces.get(self.sampler, {}).get(setup.single_worker)
        others = [one for one in paces.values() if {setup.single_worker, setup} <= one.keys()]
        ratio = others[-1][setup.single_worker].seconds / others[-1][setup].seconds if others else self.size.speedup
        times = setup.plausible_speedup(own.seconds / run.step_seconds if own is not None else ratio)
        if not times:
            return replace(run, alone=None, measured=False)
        source = own or (others[-1][setup.single_worker] if others else None)
        alone_at = source.at if source else None
        return replace(run, alone=run.step_seconds * times, measured=source is not None, alone_at=alone_at)

    def _keep_pace(self, pace: Pace) -> None:
        """Keeps a run's pace if it is the best: a disturbed one is slower. What Measure compares it has measured."""
        known = self._paces.pop(self.size.key, {})
        paces = known.pop(self.sampler, {})
        before = paces.get(pace.setup)
        if before is None or self.purpose == "measure" or pace.seconds < before.seconds:
            paces[pace.setup] = pace
        known[self.sampler] = paces
        self._paces = dict([*self._paces.items(), (self.size.key, known)][-HISTORY_LENGTH:])

    def _append(self, run: PastRun) -> None:
        """Adds a run. If there are too many, the oldest start or measurement goes first, then the oldest run."""
        runs = (*self._past, run)
        if len(runs) > HISTORY_LENGTH:
            worked = [{*WORK} & {name for name, _ in one.phases} for one in runs[:-1]]
            minor = (n for n, one in enumerate(runs[:-1]) if one.measuring or one.comparing or not worked[n])
            first = next(minor, 0)
            runs = (*runs[:first], *runs[first + 1 :])
        self._past = runs


def _setup_of(now: Status) -> RunSetup:
    return RunSetup.of(now.degrees, now.placement) if now.degrees and now.placement else RunSetup()
