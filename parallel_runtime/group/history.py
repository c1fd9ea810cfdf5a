"""The last runs of this process: the phases of each, the seconds a step, and those on one worker. A lease opens the
record of its run and closes it; states of the group are its phases."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..request import EngineOptions
from ..specs import Parallelism, Placement

PHASES = ("starting", "loading", "sampling", "decoding", "encoding")  # states of the group whose seconds are kept
MAX_SPEEDUP_PER_WORKER = 1.2  # times as fast as one worker, for each worker: beyond that one of the runs was disturbed
HISTORY_LENGTH = 8  # runs, and kinds of work, that are kept
IN_ORDER = ("encoding", "sampling", "decoding")  # leases of one run

LeasedFor = Literal["encoding", "sampling", "decoding", "prompt"]  # "encoding" and "decoding" are those of a VAE
Opener = Literal["start", "prompt", "lease"]  # "prompt": one is queued, whose lease has not begun


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run. `phases` are its finished states with their seconds, in order. `step_seconds` is the mean time between
    steps, without the first two if there are more; `waited` is the fraction of a step spent waiting for other workers,
    None if unknown. `alone` is the seconds a step on one worker: `measured` in a run of this size at the time
    `alone_at`, or else estimated; None if unknown, if workers share a device, if the speedup is implausible, or if the
    result is not that of one worker.
    `kind` is that of the devices, `tokens` the size of the work, 0 if unknown. `measuring`: CP Plan's Measure asked for
    it, `comparing`: Compare did.
    `approximate`: its result is not the picture of one GPU. `reason` says why a run was refused."""

    model: str = ""
    workers: int = 1
    kind: str = ""
    tokens: int = 0
    measuring: bool = False
    comparing: bool = False
    approximate: bool = False
    began: float = 0.0
    phases: tuple[tuple[str, float], ...] = ()
    steps: int = 0
    step_seconds: float | None = None
    waited: float | None = None
    alone: float | None = None
    measured: bool = False
    alone_at: float | None = None
    end: str = ""
    reason: str = ""

    @property
    def seconds_before(self) -> float:
        """The seconds that it took to start the workers and to load the model."""
        return sum(took for name, took in self.phases if name in ("starting", "loading"))


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
        if times is None or self.workers == 1 or self.shared or self.patched:
            return None
        return times if times <= MAX_SPEEDUP_PER_WORKER * self.workers else None


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
        self._setup = RunSetup()  # of what was loaded last
        self._paces: dict[Hashable, dict[str, dict[RunSetup, Pace]]] = {}  # the fastest, by work and sampler
        self._first_steps: list[tuple[int, float]] = []  # the first two of the run that were reported, and their times
        self._total_steps = 0  # as the last step was done
        self._last_start_seconds = 0.0  # starting and loading, of the last run with a start: it may be listed no more

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
        leases = [*self._leases, work]
        in_order = {*leases} <= {*IN_ORDER} and leases == sorted(leases, key=IN_ORDER.index)
        fits = {*leases} == {"prompt"} or (in_order and leases.count("sampling") <= 1)
        same_prompt = prompt is not None and self._asked == (prompt, self.purpose) and bool(self._leases)
        if self._open is None and same_prompt and fits and self._past and self._past[-1].end == "idle":
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
        sampled = how == "idle" and self._leases[-1:] == ("sampling",) and run.steps > 0
        # the last step may not have been reported
        self._append(replace(run, end=how, reason=reason, steps=self._total_steps if sampled else run.steps))
        if not sampled or self.size.key is None or run.step_seconds is None:
            return
        # The best pace is kept: a disturbed run is slower. What Measure compares it has measured itself.
        by_sampler = self._paces.pop(self.size.key, {})
        paces = by_sampler.pop(self.sampler, {})
        best = paces.get(self._setup)
        if best is None or self.purpose == "measure" or run.step_seconds < best.seconds:
            paces[self._setup] = Pace(setup=self._setup, seconds=run.step_seconds, at=run.began)
        by_sampler[self.sampler] = paces
        self._paces = dict([*self._paces.items(), (self.size.key, by_sampler)][-HISTORY_LENGTH:])

    def paces(self, key: Hashable) -> tuple[Pace, ...]:
        """Returns the paces of this work with its last sampler, fewest workers first; () for a single setup."""
        several = [paces for paces in self._paces.get(key, {}).values() if len(paces) > 1]
        paces = several[-1] if several else {}
        found = []
        for pace in sorted(paces.values(), key=lambda pace: (pace.setup.workers, *pace.setup.degrees.by_name.values())):
            single = paces.get(pace.setup.single_worker)
            times = single.seconds / pace.seconds if single else None
            found.append(replace(pace, speedup=pace.setup.plausible_speedup(times)))
        return tuple(found)

    def cost(self, key: Hashable, workers: Sequence[int], steps: int) -> float | None:
        """Estimates the seconds of `steps` by number of workers, with starting and loading; None for unknown work."""
        paces = [pace for paces in self._paces.get(key, {}).values() for pace in paces.values()]
        if not paces:
            return None
        on_one = min(pace.seconds * pace.setup.workers for pace in paces)
        before = max(self._last_start_seconds, *(run.seconds_before for run in self.runs))
        return sum(before + steps * on_one / count for count in workers)

    def state_changed(self, state: str, at: float, placement: Placement | None, degrees: Parallelism | None) -> None:
        """The group is in another state since `at`, by time.monotonic: a phase of the open run ends, and perhaps the
        next one begins."""
        self._end_phase(at)
        if state == "starting" and self._open is None:
            self._begin("start")
        if state == "loading":
            self._setup = RunSetup.of(degrees, placement) if degrees and placement else RunSetup()
        if self._open is None:
            return
        if state in PHASES:
            self._phase = state, at
        elif self._opener == "start" or (self._opener == "prompt" and self._open.phases and state != "idle"):
            self.close("idle" if state == "none" else state)
            return
        if placement is not None:
            self._open = replace(self._open, workers=placement.world_size, kind=placement.device_kind)
        if state == "loading" and degrees is not None:
            self._first_steps = []
            self._open = replace(self._open, approximate=degrees.options.approximate)

    def step_done(self, step: int, total: int, waited: float | None) -> None:
        """So many steps of `total` are done; ranks `waited` this share of the last one for others."""
        # The pace leaves out the first step, and the second one too once there are more: workers that have just started
        # may record it, and a run on warm ones would look faster than what it is compared with.
        now = time.monotonic()
        self._first_steps = [*self._first_steps, (step, now)][:2]
        if self._open is None:
            return
        first, began = max((earlier for earlier in self._first_steps if earlier[0] < step), default=(step, now))
        seconds = (now - began) / (step - first) if step > first else self._open.step_seconds
        self._total_steps = total
        self._open = replace(self._open, tokens=self.size.tokens, steps=step, step_seconds=seconds, waited=waited)
        if seconds is None or self._open.workers == 1:
            return
        # One worker's seconds a step: measured with this sampler, else scaled from another one, else estimated.
        setup, single = self._setup, self._setup.single_worker
        by_sampler = self._paces.get(self.size.key, {})
        source, times = by_sampler.get(self.sampler, {}).get(single), self.size.speedup
        if source is not None:
            times = source.seconds / seconds
        elif others := [paces for paces in by_sampler.values() if {single, setup} <= paces.keys()]:
            source = others[-1][single]
            times = source.seconds / others[-1][setup].seconds
        times = setup.plausible_speedup(times)
        if not times:
            self._open = replace(self._open, alone=None, measured=False)
            return
        alone_at = source.at if source else None
        self._open = replace(self._open, alone=seconds * times, measured=source is not None, alone_at=alone_at)

    def refused(self, reason: str) -> None:
        """A run was refused for this reason. Another report of it, where it leaves the node, changes nothing."""
        if not any(run.reason is reason for run in self.runs):
            self._append(PastRun(began=time.time(), end="refused", reason=reason))

    def _begin(self, opener: Opener) -> None:
        """Opens a record. Of a start that goes on it has what follows; another record that is open is over."""
        phase, now = self._phase, time.monotonic()
        self.close("idle")
        self._phase = (phase[0], now) if phase is not None else None
        self._open, self._opener, self._leases = PastRun(began=time.time()), opener, ()

    def _end_phase(self, at: float) -> None:
        if self._open is not None and self._phase is not None:
            name, began = self._phase
            self._open = replace(self._open, phases=(*self._open.phases, (name, at - began)))
        self._phase = None

    def _append(self, run: PastRun) -> None:
        """Adds a run. If there are too many, the oldest start or measurement goes first, then the oldest run."""
        if any(name == "starting" for name, _ in run.phases):
            self._last_start_seconds = run.seconds_before
        runs = [*self._past, run]
        if len(runs) > HISTORY_LENGTH:
            minor = (
                one for one in runs[:-1]
                if one.measuring or one.comparing or all(name == "starting" for name, _ in one.phases)
            )  # fmt: skip
            first = next(minor, runs[0])
            runs = [one for one in runs if one is not first]
        self._past = tuple(runs)
