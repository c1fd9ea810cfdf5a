"""The last runs of this process as a user would tell of them: what each spent its time on, how long a step took, and
how long on one worker. Knows no group: all follows from its states."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from ..specs import DEGREES, Parallelism, Placement
from .status import WORK, Run, Status

BELIEVED = 1.2  # times as fast as one worker, for each worker: beyond that one of the runs was disturbed
KEPT = 8  # runs, and what else is remembered of so many kinds of work
TIMED = {"starting", *WORK}
ENDS = {"idle", "cancelled", "died", "none"}


@dataclass(frozen=True)
class Size:
    """What was asked of the workers: two runs with the same `key` take as long on the same workers. `times` as fast as
    one worker they are estimated to be, None where nobody can say."""

    key: Hashable
    times: float | None = None


@dataclass(frozen=True)
class Cut:
    """How a run was divided, by `sizes` of DEGREES, and on devices of what kind; `shared`: several workers have the
    same one, or the cores of one machine."""

    sizes: tuple[int, ...] = (1,) * len(DEGREES)
    kind: str = ""
    shared: bool = False

    @classmethod
    def of(cls, degrees: Parallelism, placement: Placement) -> Cut:
        kind = placement.devices[0].partition(":")[0]
        return cls(tuple(degrees.by_name.values()), kind, placement.shared)

    @property
    def degrees(self) -> dict[str, int]:
        return dict(zip(DEGREES, self.sizes, strict=True))

    @property
    def workers(self) -> int:
        return math.prod(self.sizes)

    @property
    def alone(self) -> Cut:
        return Cut(kind=self.kind)

    def credible(self, times: float | None) -> float | None:
        """So many times as fast as one worker; None where that says nothing of several devices."""
        believed = times is not None and self.workers > 1 and times <= BELIEVED * self.workers
        return times if believed and not self.shared else None


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds a step that were measured of a cut; `times` as fast as one worker, None where nobody can say."""

    cut: Cut
    seconds: float
    times: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of measuring: so many steps on so many workers, one count after the other; `seconds` are None where nobody
    knows."""

    steps: int
    workers: Sequence[int]
    cpu: bool
    seconds: float | None


class History:
    """`runs` are the last ones, oldest first, and the one that goes on. `size` and `sampler` are of what is asked next:
    a step of one sampler may be several evaluations. `wanted` is since when somebody waits for the workers, None where
    nobody does."""

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self.size = Size(None)
        self.sampler = ""
        self.wanted: float | None = None
        self._paces: dict[Hashable, dict[str, dict[Cut, float]]] = {}  # by work and sampler
        self._first: tuple[int, float] | None = None  # of the run's steps that was told, and when

    def paces(self, key: Hashable) -> tuple[Pace, ...]:
        """What was measured of this work with the sampler that was last, on few workers first; nothing of one cut
        alone."""
        found = [paces for paces in self._paces.get(key, {}).values() if len(paces) > 1]
        paces = found[-1] if found else {}
        return tuple(
            Pace(cut=cut, seconds=seconds, times=cut.credible(paces.get(cut.alone, math.inf) / seconds))
            for cut, seconds in sorted(paces.items(), key=lambda pace: (pace[0].workers, pace[0].sizes))
        )

    def cost(self, key: Hashable, workers: Sequence[int], steps: int) -> float | None:
        """About how many seconds so many steps of this work take on so many workers and then on others, who start and
        load first; None where it has not run here."""
        paces = [pace for paces in self._paces.get(key, {}).values() for pace in paces.items()]
        if not paces:
            return None
        alone = min(seconds * cut.workers for cut, seconds in paces)
        before = max(sum(took for name, took in run.phases if name in ("starting", "loading")) for run in self.runs)
        return sum(before + steps * alone / count for count in workers)

    def turned(self, before: Status, now: Status) -> None:
        """The state of `before` is over, and another one has begun."""
        if before.state in TIMED:
            phase = (before.state, max(0.0, now.since - before.since))
            self._last(replace(self.runs[-1], phases=(*self.runs[-1].phases, phase)))
        if now.state in WORK:
            self._begin_when_wanted()
        workers = now.placement.world_size if now.placement else 1
        if now.state in TIMED and self._is_another(now.state):
            self.runs = (*self.runs, Run(began=now.since, workers=workers))[-KEPT:]
        if now.state in ("loading", "sampling"):
            self._last(replace(self.runs[-1], model=now.model, workers=workers))
        if now.state == "loading":
            self._first = None
        if now.state in ENDS - {"none"} and before.state != "starting":
            self.wanted = None
        if now.state in ENDS and before.state in (*WORK, "cancelling"):
            self._ended(before, now.state)

    def stepped(self, now: Status, at: float) -> None:
        """A step more is done."""
        first, began = self._first = self._first or (now.step, at)
        run = self.runs[-1]
        pace = (at - began) / (now.step - first) if now.step > first else run.step_seconds
        self._last(self._compared(replace(run, steps=now.step, step_seconds=pace, waited=now.waited), _cut(now)))

    def _begin_when_wanted(self) -> None:
        """What of a start was over before anybody asked for the run is none of its time: it stands by itself."""
        start = self.runs[-1] if self.runs else Run()
        if self.wanted is None or self.wanted <= start.began or [name for name, _ in start.phases] != ["starting"]:
            return
        ((_, took),) = start.phases
        before = min(took, self.wanted - start.began)
        self._last(replace(start, phases=(("starting", before),), end="idle"))
        own = (("starting", took - before),) if took > before else ()
        self.runs = (*self.runs, replace(start, began=self.wanted, phases=own))[-KEPT:]

    def _is_another(self, state: str) -> bool:
        """Does a new run begin with it? A start and an encoding come before a run's steps, a decoding after them."""
        if not self.runs or state == "starting":
            return True
        been = {name for name, _ in self.runs[-1].phases}
        if state == "loading":
            return bool(been & {"loading", "sampling", "decoding"})
        return state == "encoding" and bool(been & {"sampling", "decoding"})

    def _compared(self, run: Run, cut: Cut) -> Run:
        """Beside one worker: in a run of this sampler, else by what another sampler's two runs say, else estimated."""
        if run.step_seconds is None or run.workers == 1:
            return run
        paces = self._paces.get(self.size.key, {})
        own = paces.get(self.sampler, {}).get(cut.alone)
        others = [one[cut.alone] / one[cut] for one in paces.values() if {cut.alone, cut} <= one.keys()]
        estimated = others[-1] if others else self.size.times
        times = cut.credible(own / run.step_seconds if own is not None else estimated)
        alone = run.step_seconds * times if times else None
        return replace(run, alone=alone, measured=alone is not None and (own is not None or bool(others)))

    def _ended(self, before: Status, how: str) -> None:
        run = self.runs[-1]
        sampled = before.state == "sampling" and how == "idle"
        # the last step may not have been told by itself
        self._last(replace(run, end=run.end or how, steps=before.steps if sampled else run.steps))
        if sampled and self.size.key is not None and run.step_seconds is not None:
            known = self._paces.pop(self.size.key, {})
            known[self.sampler] = {**known.pop(self.sampler, {}), _cut(before): run.step_seconds}
            self._paces = dict([*self._paces.items(), (self.size.key, known)][-KEPT:])

    def _last(self, run: Run) -> None:
        self.runs = (*self.runs[:-1], run)


def _cut(now: Status) -> Cut:
    """How the run of this state is divided."""
    return Cut.of(now.degrees, now.placement) if now.degrees and now.placement else Cut()
