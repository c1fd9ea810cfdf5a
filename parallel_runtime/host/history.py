"""The last runs of this process as a user would tell of them: what each spent its time on, how long a step took, and
how long on one worker. Knows no group: it is told what state began and which step was done."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from ..specs import DEGREES, Parallelism, Placement

BELIEVED = 1.2  # times as fast as one worker, for each worker: beyond that one of the runs was disturbed
KEPT = 8  # runs, and what else is remembered of so many kinds of work
WORK = {"loading", "sampling", "decoding", "encoding"}
TIMED = {"starting", *WORK}
ENDS = {"idle", "cancelled", "died", "none"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """`phases` are states and the seconds that each took, in order; one that is not over is not among them. Seconds a
    step are those between steps, the first one's beginning left out; `waited` is the share of a step in which workers
    waited for one another, None where nobody can say. On one worker a step takes `alone` seconds: `measured` in a run
    of this size, or else estimated; None where nobody knows, or workers share a device, or what it says is beyond
    belief."""

    model: str = ""
    workers: int = 1
    began: float = 0.0
    phases: tuple[tuple[str, float], ...] = ()
    steps: int = 0
    step_seconds: float | None = None
    waited: float | None = None
    alone: float | None = None
    measured: bool = False
    end: str = ""

    def has(self, *phases: str) -> bool:
        return any(name in phases for name, _ in self.phases)


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
    """Fill it by `turned` and `stepped`; `runs` are the last ones, oldest first, and the one that goes on."""

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self._size = Size(None)
        self._sampler = ""
        self._cut = Cut()
        self._paces: dict[Hashable, dict[str, dict[Cut, float]]] = {}  # by work and sampler
        self._first: tuple[int, float] | None = None
        self._steps = 0  # that the run shall have
        self._wanted: float | None = None  # since when somebody wants the workers for a run

    def of_size(self, size: Size) -> None:
        """What the next run, or the one that goes on, is asked to do."""
        self._size = size

    def with_sampler(self, sampler: str) -> None:
        """A step of one may be several evaluations."""
        self._sampler = sampler

    def divided(self, cut: Cut) -> None:
        """Among whom the run that begins now is divided, and how."""
        self._cut = cut

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

    def wanted(self, at: float, *, anew: bool) -> None:
        """Somebody asks for the workers; `anew`: for another run than who did so before."""
        if anew or self._wanted is None:
            self._wanted = at

    def unwanted(self) -> None:
        """What starts now nobody has asked for."""
        self._wanted = None

    def turned(self, before: str, since: float, now: str, at: float, *, model: str = "", workers: int = 1) -> None:
        """The state `before`, which had begun at `since`, is over, and `now` has begun `at`."""
        if before in TIMED and self.runs:
            last = self.runs[-1]
            self._last(replace(last, phases=(*last.phases, (before, max(0.0, at - since)))))
        if now in WORK:
            self._begin_when_wanted()
        if now in TIMED and self._is_another(now):
            self.runs = (*self.runs, Run(began=at, workers=workers))[-KEPT:]
        if now in ("loading", "sampling") and self.runs:
            self._last(replace(self.runs[-1], model=model, workers=workers))
        if now == "loading":
            self._first, self._steps = None, 0
        if now in ENDS - {"none"} and before != "starting":
            self.unwanted()
        if now in ENDS and before in {*WORK, "cancelling"}:
            self._ended(now, sampled=before == "sampling")

    def stepped(self, step: int, steps: int, at: float, waited: float | None) -> None:
        """So many of `steps` are done; of the last one ranks waited this share."""
        self._steps = steps
        if not self.runs:
            return
        if self._first is None:
            self._first = (step, at)
        first, began = self._first
        pace = (at - began) / (step - first) if step > first else self.runs[-1].step_seconds
        self._last(self._compared(replace(self.runs[-1], steps=step, step_seconds=pace, waited=waited)))

    def _begin_when_wanted(self) -> None:
        """What of a start was over before anybody asked for the run is none of its time: it stands by itself."""
        start = self.runs[-1] if self.runs else Run()
        if self._wanted is None or self._wanted <= start.began or [name for name, _ in start.phases] != ["starting"]:
            return
        ((_, took),) = start.phases
        before = min(took, self._wanted - start.began)
        self._last(replace(start, phases=(("starting", before),), end="idle"))
        own = (("starting", took - before),) if took > before else ()
        self.runs = (*self.runs, replace(start, began=self._wanted, phases=own))[-KEPT:]

    def _is_another(self, state: str) -> bool:
        """Does a new run begin with it? A start and an encoding come before a run's steps, a decoding after them."""
        if not self.runs or state == "starting":
            return True
        if state == "loading":
            return self.runs[-1].has("loading", "sampling", "decoding")
        return state == "encoding" and self.runs[-1].has("sampling", "decoding")

    def _compared(self, run: Run) -> Run:
        """Beside one worker: in a run of this sampler, else by what another sampler's two runs say, else estimated."""
        if run.step_seconds is None or run.workers == 1:
            return run
        paces, cut = self._paces.get(self._size.key, {}), self._cut
        own = paces.get(self._sampler, {}).get(cut.alone)
        others = [one[cut.alone] / one[cut] for one in paces.values() if {cut.alone, cut} <= one.keys()]
        estimated = others[-1] if others else self._size.times
        times = cut.credible(own / run.step_seconds if own is not None else estimated)
        alone = run.step_seconds * times if times else None
        return replace(run, alone=alone, measured=alone is not None and (own is not None or bool(others)))

    def _ended(self, how: str, *, sampled: bool) -> None:
        if not self.runs:
            return
        run = self.runs[-1]
        if sampled and how == "idle":  # the last step may not have been told by itself
            run = replace(run, steps=self._steps)
        self._last(replace(run, end=run.end or how))
        if sampled and how == "idle" and self._size.key is not None and run.step_seconds is not None:
            known = self._paces.pop(self._size.key, {})
            known[self._sampler] = {**known.pop(self._sampler, {}), self._cut: run.step_seconds}
            self._paces = dict([*self._paces.items(), (self._size.key, known)][-KEPT:])

    def _last(self, run: Run) -> None:
        self.runs = (*self.runs[:-1], run)
