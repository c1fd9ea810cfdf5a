"""The last runs of this process: the phases of each, the seconds a step, and those on one worker. Everything follows
from the group's states."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from ..request import EngineOptions
from ..specs import Parallelism, Placement
from .group_status import WORK, PastRun, Status

MAX_SPEEDUP_PER_WORKER = 1.2  # times as fast as one worker, for each worker: beyond that one of the runs was disturbed
HISTORY_LENGTH = 8  # runs, and kinds of work, that are kept
TIMED = {"starting", *WORK}
ENDS = {"idle", "cancelled", "died", "none"}


@dataclass(frozen=True)
class Size:
    """The size of a run: two runs with the same `key` take equally long on the same workers. `speedup` is the estimate
    against one worker, None if unknown; `tokens` are those of one image, 0 if unknown."""

    key: Hashable
    speedup: float | None = None
    tokens: int = 0


@dataclass(frozen=True)
class RunSetup:
    """How a run was divided: its `degrees`, without what else a Parallelism has, and the kind of devices. `shared`:
    several workers use one device, or the cores of one machine. `patched`: by token patches, which one worker has
    not."""

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
    def alone(self) -> RunSetup:
        return RunSetup(kind=self.kind)

    def plausible_speedup(self, times: float | None) -> float | None:
        """Returns this speedup, or None if it is implausible, the devices are shared, or the result is not that of one
        worker (token patches)."""
        believed = times is not None and self.workers > 1 and times <= MAX_SPEEDUP_PER_WORKER * self.workers
        return times if believed and not self.shared and not self.patched else None


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Measured seconds a step of a setup, and the time of that run in seconds of the epoch; `speedup` is against one
    worker, None if unknown."""

    setup: RunSetup
    seconds: float
    at: float = 0.0
    speedup: float | None = None


class History:
    """`runs` are the last ones, oldest first, and the current one. `size` and `sampler` are those of the current run,
    or of the next one: a step of one sampler may be several evaluations. `requested_at` is since when a run waits for
    the workers, None where none does. `measuring`: CP Plan runs a few steps to measure."""

    def __init__(self) -> None:
        self.runs: tuple[PastRun, ...] = ()
        self.size = Size(None)
        self.sampler = ""
        self.requested_at: float | None = None
        self.measuring = False
        self._paces: dict[Hashable, dict[str, dict[RunSetup, Pace]]] = {}  # the fastest, by work and sampler
        self._first_steps: list[tuple[int, float]] = []  # the first two of the run that were reported, and their times

    def paces(self, key: Hashable) -> tuple[Pace, ...]:
        """Returns the paces measured for this work with its last sampler, fewest workers first; () for a single
        setup."""
        several = [paces for paces in self._paces.get(key, {}).values() if len(paces) > 1]
        paces = several[-1] if several else {}
        ordered = sorted(paces.values(), key=lambda pace: (pace.setup.workers, *pace.setup.degrees.by_name.values()))
        alone = {pace.setup: pace.seconds for pace in ordered}
        speedups = (
            pace.setup.plausible_speedup(alone.get(pace.setup.alone, math.inf) / pace.seconds) for pace in ordered
        )
        return tuple(replace(pace, speedup=speedup) for pace, speedup in zip(ordered, speedups, strict=True))

    def cost(self, key: Hashable, workers: Sequence[int], steps: int) -> float | None:
        """Estimates the seconds of `steps` on each number of workers in turn, with starting and loading; None for work
        that has not run here."""
        paces = [pace for paces in self._paces.get(key, {}).values() for pace in paces.values()]
        if not paces:
            return None
        alone = min(pace.seconds * pace.setup.workers for pace in paces)
        before = max(sum(took for name, took in run.phases if name in ("starting", "loading")) for run in self.runs)
        return sum(before + steps * alone / count for count in workers)

    def state_changed(self, before: Status, now: Status) -> None:
        """The group's state has changed from `before` to `now`."""
        if before.state in TIMED:
            phase = (before.state, now.began_at - before.began_at)
            self._replace_last(replace(self.runs[-1], phases=(*self.runs[-1].phases, phase)))
        if now.state in WORK:
            self._split_off_early_start()
        workers = now.placement.world_size if now.placement else 1
        kind = now.placement.device_kind if now.placement else ""
        if now.state in TIMED and self._begins_run(now.state):
            self._append(PastRun(began=now.since, workers=workers, kind=kind, measuring=self.measuring))
        if now.state in ("loading", "sampling"):
            approximate = now.degrees is not None and now.degrees.options.approximate
            self._replace_last(
                replace(self.runs[-1], model=now.model, measuring=self.measuring, approximate=approximate)
            )
        if now.state == "loading":
            self._first_steps = []
        if now.state in ENDS - {"none"} and before.state != "starting":
            self.requested_at = None
        failed = now.state == "unstarted" and before.state == "starting"
        if failed or (now.state in ENDS and before.state in (*WORK, "cancelling")):
            self._ended(before, now.state)

    def step_done(self, now: Status, at: float) -> None:
        """Another step is done, `at` this time by time.monotonic. The pace leaves out the first step, and the second
        one too once there are more: workers that have just started may record it, and a run on warm ones would look
        faster than what it is compared with."""
        self._first_steps = [*self._first_steps, (now.step, at)][:2]
        first, began = max((step for step in self._first_steps if step[0] < now.step), default=(now.step, at))
        run = replace(self.runs[-1], tokens=self.size.tokens)
        pace = (at - began) / (now.step - first) if now.step > first else run.step_seconds
        self._replace_last(
            self._with_single_worker(replace(run, steps=now.step, step_seconds=pace, waited=now.waited), _setup_of(now))
        )

    def refused(self, reason: str, at: float, *, working: bool) -> None:
        """A run was refused for this reason: the one that the workers are `working` on, or else one that never began.
        The second report of one refusal, where it leaves the node, changes nothing."""
        if any(run.reason is reason for run in self.runs):
            return
        if working:
            self._replace_last(replace(self.runs[-1], end="refused", reason=reason))
            return
        goes_on = self.runs[-1:] if self.runs and not self.runs[-1].end else ()  # a start, which stays the last one
        self.runs = self.runs[: len(self.runs) - len(goes_on)]
        for run in (PastRun(began=at, end="refused", reason=reason), *goes_on):
            self._append(run)

    def _split_off_early_start(self) -> None:
        """Counts only the start-up time after the run was requested; the rest becomes an entry of its own."""
        start = self.runs[-1] if self.runs else PastRun()
        if (
            self.requested_at is None
            or self.requested_at <= start.began
            or [name for name, _ in start.phases] != ["starting"]
        ):
            return
        ((_, took),) = start.phases
        before = min(took, self.requested_at - start.began)
        self._replace_last(replace(start, phases=(("starting", before),), end="idle"))
        remaining = (("starting", took - before),) if took > before else ()
        self._append(replace(start, began=self.requested_at, phases=remaining))

    def _begins_run(self, state: str) -> bool:
        """Does a new run begin with this state? The order within a run is start, encoding, loading, steps, decoding;
        a run that failed, was cancelled or refused has ended."""
        if not self.runs or state == "starting" or self.runs[-1].end not in ("", "idle"):
            return True
        phases = {name for name, _ in self.runs[-1].phases}
        if state == "loading":
            return bool(phases & {"loading", "sampling", "decoding"})
        return state == "encoding" and bool(phases & {"sampling", "decoding"})

    def _with_single_worker(self, run: PastRun, setup: RunSetup) -> PastRun:
        """Adds the seconds a step on one worker: measured with this sampler, else scaled from another sampler, else
        estimated."""
        if run.step_seconds is None or run.workers == 1:
            return run
        paces = self._paces.get(self.size.key, {})
        own = paces.get(self.sampler, {}).get(setup.alone)
        others = [one for one in paces.values() if {setup.alone, setup} <= one.keys()]
        ratio = others[-1][setup.alone].seconds / others[-1][setup].seconds if others else self.size.speedup
        times = setup.plausible_speedup(own.seconds / run.step_seconds if own is not None else ratio)
        if not times:
            return replace(run, alone=None, measured=False)
        source = own or (others[-1][setup.alone] if others else None)
        alone_at = source.at if source else None
        return replace(run, alone=run.step_seconds * times, measured=source is not None, alone_at=alone_at)

    def _ended(self, before: Status, how: str) -> None:
        run = self.runs[-1]
        sampled = before.state == "sampling" and how == "idle"
        # the last step may not have been reported
        self._replace_last(replace(run, end=run.end or how, steps=before.steps if sampled else run.steps))
        if sampled and self.size.key is not None and run.step_seconds is not None:
            known = self._paces.pop(self.size.key, {})
            paces = known.pop(self.sampler, {})
            pace = Pace(setup=_setup_of(before), seconds=run.step_seconds, at=run.began)
            known_pace = paces.get(
                pace.setup
            )  # a disturbed run is a slower one; what Measure compares, it has measured
            if known_pace is None or self.measuring or pace.seconds < known_pace.seconds:
                paces[pace.setup] = pace
            known[self.sampler] = paces
            self._paces = dict([*self._paces.items(), (self.size.key, known)][-HISTORY_LENGTH:])

    def _append(self, run: PastRun) -> None:
        """Adds a run. If there are too many, the oldest start or measurement goes first, then the oldest run."""
        runs = (*self.runs, run)
        if len(runs) > HISTORY_LENGTH:
            minor = [
                n for n, one in enumerate(runs[:-1]) if one.measuring or not {*WORK} & {name for name, _ in one.phases}
            ]
            first = minor[0] if minor else 0
            runs = (*runs[:first], *runs[first + 1 :])
        self.runs = runs

    def _replace_last(self, run: PastRun) -> None:
        self.runs = (*self.runs[:-1], run)


def _setup_of(now: Status) -> RunSetup:
    return RunSetup.of(now.degrees, now.placement) if now.degrees and now.placement else RunSetup()
