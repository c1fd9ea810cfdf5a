"""The status of the worker group as one frozen value, which is replaced, never changed: readers need no lock. And the
last lines that workers printed and this pack logged, by rank, to show them after a failure."""

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..specs import Parallelism, Placement
from ..wire.messages import SHOWN, Busy, Readings

State = Literal[
    "none", "starting", "unstarted", "loading", "sampling", "decoding", "encoding", "cancelling", "cancelled", "idle",
    "died",
]  # fmt: skip
# Of a start: waiting for other machines; waiting for workers, which import PyTorch; workers import ComfyUI, form the
# process group and measure.
Stage = Literal["", "machines", "processes", "meeting"]
CONVERTING: tuple[State, ...] = ("decoding", "encoding")  # states of a VAE run
WORK: tuple[State, ...] = ("loading", "sampling", *CONVERTING)
BUSY: tuple[State, ...] = ("starting", *WORK, "cancelling")
RESTING: tuple[State, ...] = ("idle", "cancelled")
LINES = 500
LINE_CHARACTERS = 2000
HIDDEN = "***"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One worker. `machine` is "" for this machine; `loaded` is the fraction of the model that it has loaded."""

    rank: int
    device: str
    machine: str = ""
    loaded: float = 0.0
    readings: Readings | None = None
    busy: Busy = ""

    @property
    def shown(self) -> dict[str, float | None]:
        """What the page shows of the readings, each None if unknown."""
        values = {name: getattr(self.readings, name, None) for name in SHOWN}
        return values | {"step_seconds": values["step_seconds"] or None}  # 0 before the first step


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How a group was lost: the rank that failed first, None if none did, the kind of its Cause, and its last printed
    lines. Until `settled` is set the cause may change."""

    rank: int | None = None
    kind: str = ""
    words: tuple[str, ...] = ()
    settled: bool = True


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


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of the group. `reason` says why it died or ended. `step` of `steps` counts sampling steps, frames of a
    VAE's video, or workers that are up in this `stage` of a start; both are 0 where the sampler runs in ComfyUI's
    process. `since` is the time, in seconds of the epoch, at which `state` began, and `began_at` the same by
    time.monotonic: the clock of the epoch may be set meanwhile."""

    state: State = "none"
    stage: Stage = ""
    loss: Loss | None = None
    reason: str = ""
    since: float = field(default_factory=lambda: time.time())
    began_at: float = field(default_factory=lambda: time.monotonic())
    placement: Placement | None = None
    degrees: Parallelism | None = None
    model: str = ""
    step: int = 0
    steps: int = 0
    ranks: tuple[RankStatus, ...] = ()
    runs: tuple[PastRun, ...] = ()

    @property
    def loaded(self) -> float:
        """The fraction of the model that the slowest rank has loaded."""
        return min((rank.loaded for rank in self.ranks), default=0.0)

    @property
    def waited(self) -> float | None:
        """The mean fraction of a step in which ranks waited for one another."""
        readings = [rank.readings for rank in self.ranks if rank.readings is not None and rank.readings.step_seconds]
        shares = [one.waited_seconds / one.step_seconds for one in readings if one.waited_seconds is not None]
        return min(1.0, sum(shares) / len(shares)) if shares else None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the log. `rank` is None for ComfyUI's process; `at` is in seconds of the epoch."""

    at: float
    rank: int | None
    text: str


class Journal(logging.Handler):
    """A logging handler that keeps the last lines; `note` adds lines of workers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[Line] = deque(maxlen=LINES)

    def note(self, text: str, rank: int | None = None, hide: Iterable[str] = ()) -> None:
        """Adds a line, with the secrets in `hide` masked."""
        for secret in filter(None, hide):
            text = text.replace(secret, HIDDEN)
        self._lines.append(Line(at=time.time(), rank=rank, text=text[:LINE_CHARACTERS]))

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.endswith(".torchrun"):  # torchrun.py adds its lines by `note`, whatever the level
            for line in record.getMessage().splitlines():
                self.note(line)

    def tail(self, lines: int = LINES, rank: int | None = None) -> list[Line]:
        """Returns the last `lines`, oldest first, of one rank or of all."""
        chosen = [line for line in list(self._lines) if rank is None or line.rank == rank]
        return chosen[-lines:] if lines > 0 else []
