"""What the worker group is doing, as one frozen value that is replaced as a whole: whoever reads it needs no lock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from ..specs import Parallelism, Placement
from ..wire.readings import Busy, Readings

State = Literal[
    "none", "starting", "unstarted", "loading", "sampling", "decoding", "encoding", "cancelling", "cancelled", "idle",
    "died",
]  # fmt: skip
# Of a start: other machines are waited for; workers are, each of which imports PyTorch; they import ComfyUI, meet and
# measure.
Stage = Literal["", "machines", "processes", "meeting"]
CONVERTING: tuple[State, ...] = ("decoding", "encoding")  # a VAE is at work
WORK: tuple[State, ...] = ("loading", "sampling", *CONVERTING)
BUSY: tuple[State, ...] = ("starting", *WORK, "cancelling")
RESTING: tuple[State, ...] = ("idle", "cancelled")


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One worker. `machine` is "" for this one; `loaded` the share of the model that it has."""

    rank: int
    device: str
    machine: str = ""
    loaded: float = 0.0
    readings: Readings | None = None
    busy: Busy = ""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The rank that a group was lost by, None where it was none, and what it printed last. Until this is `settled` it
    may yet be known better."""

    rank: int | None = None
    words: tuple[str, ...] = ()
    settled: bool = True


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


@dataclass(frozen=True, kw_only=True)
class Status:
    """`reason` says why a group died or ended. `step` of `steps` are done, or frames of a VAE's video, or workers that
    are up in this `stage` of a start; both are 0 where the sampler runs in ComfyUI's process. `since` is the time, in
    seconds of the epoch, at which `state` began."""

    state: State = "none"
    stage: Stage = ""
    loss: Loss | None = None
    reason: str = ""
    since: float = field(default_factory=lambda: time.time())
    placement: Placement | None = None
    degrees: Parallelism | None = None
    model: str = ""
    step: int = 0
    steps: int = 0
    ranks: tuple[RankStatus, ...] = ()
    runs: tuple[Run, ...] = ()

    @property
    def loaded(self) -> float:
        """The share that the slowest rank has loaded."""
        return min((rank.loaded for rank in self.ranks), default=0.0)

    @property
    def waited(self) -> float | None:
        """The share of a step in which ranks waited for one another, on average."""
        told = [rank.readings for rank in self.ranks if rank.readings is not None and rank.readings.step_seconds]
        shares = [one.waited_seconds / one.step_seconds for one in told if one.waited_seconds is not None]
        return min(1.0, sum(shares) / len(shares)) if shares else None
