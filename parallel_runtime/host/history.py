"""The last runs of this process as a user would tell of them: what each spent its time on, how long a step took, and
how long on one worker. Knows no group: it is told what state began and which step was done."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

KEPT = 8  # runs, and what else is remembered of so many kinds of work
WORK = {"loading", "sampling", "decoding", "encoding"}
TIMED = {"starting", *WORK}
ENDS = {"idle", "cancelled", "died", "none"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """`phases` are states and the seconds that each took, in order; one that is not over is not among them. Seconds a
    step are those between steps, the first one's beginning left out; `waited` is the share of a step in which workers
    waited for one another, None where nobody can say. On one worker a step takes `alone` seconds: `measured` in a run
    of this size, or else estimated; None where nobody knows."""

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


class History:
    """Fill it by `turned` and `stepped`; `runs` are the last ones, oldest first, and the one that goes on."""

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self._size = Size(None)
        self._sampler = ""
        self._paces: dict[Hashable, dict[str, dict[int, float]]] = {}  # by work, sampler and workers
        self._first: tuple[int, float] | None = None
        self._steps = 0  # that the run shall have

    def of_size(self, size: Size) -> None:
        """What the next run, or the one that goes on, is asked to do."""
        self._size = size

    def with_sampler(self, sampler: str) -> None:
        """A step of one may be several evaluations."""
        self._sampler = sampler

    def pace(self, key: Hashable) -> dict[int, float]:
        """Seconds a step that were measured of this work, by the number of workers: of the sampler that was last."""
        found = [paces for paces in self._paces.get(key, {}).values() if len(paces) > 1]
        return dict(sorted(found[-1].items())) if found else {}

    def turned(self, before: str, since: float, now: str, at: float, *, model: str = "", workers: int = 1) -> None:
        """The state `before`, which had begun at `since`, is over, and `now` has begun `at`."""
        if before in TIMED and self.runs:
            last = self.runs[-1]
            self._last(replace(last, phases=(*last.phases, (before, max(0.0, at - since)))))
        if now in TIMED and self._is_another(now):
            self.runs = (*self.runs, Run(began=at, workers=workers))[-KEPT:]
        if now in ("loading", "sampling") and self.runs:
            self._last(replace(self.runs[-1], model=model, workers=workers))
        if now == "loading":
            self._first, self._steps = None, 0
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
        paces = self._paces.get(self._size.key, {})
        own = paces.get(self._sampler, {}).get(1)
        others = [one[1] / one[run.workers] for one in paces.values() if {1, run.workers} <= one.keys()]
        times = others[-1] if others else self._size.times
        alone = own if own is not None else run.step_seconds * times if times else None
        return replace(run, alone=alone, measured=own is not None or bool(others))

    def _ended(self, how: str, *, sampled: bool) -> None:
        if not self.runs:
            return
        run = self.runs[-1]
        if sampled and how == "idle":  # the last step may not have been told by itself
            run = replace(run, steps=self._steps)
        self._last(replace(run, end=run.end or how))
        if sampled and how == "idle" and self._size.key is not None and run.step_seconds is not None:
            known = self._paces.pop(self._size.key, {})
            known[self._sampler] = {**known.get(self._sampler, {}), run.workers: run.step_seconds}
            self._paces = dict([*self._paces.items(), (self._size.key, known)][-KEPT:])

    def _last(self, run: Run) -> None:
        self.runs = (*self.runs[:-1], run)
