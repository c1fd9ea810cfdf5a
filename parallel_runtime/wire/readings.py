"""What a rank reports beside its results: memory, the models that it has, the time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Busy = Literal["", "compiling", "recording"]  # with what makes later evaluations faster


@dataclass(frozen=True)
class ModelMemory:
    """The bytes that a rank has of one model: weights on its device, weights elsewhere that it fetches when needed, and
    recorded forwards on the device, which can be dropped at any time. `model` is its title for users; `fingerprint`
    identifies its spec."""

    model: str
    resident: int
    fetched: int = 0
    fingerprint: str = ""
    recorded: int = 0

    @property
    def device_bytes(self) -> int:
        return self.resident + self.recorded


@dataclass(frozen=True)
class Graphs:
    """Forwards that a rank has recorded: how many kinds of calls, how often they were replayed in all, the bytes of
    its device that they hold; and why others are `eager`, in a few words each."""

    keys: int = 0
    replays: int = 0
    bytes: int = 0
    eager: tuple[str, ...] = ()


@dataclass(frozen=True)
class Readings:
    """The measurements of one rank, all of the same moment. `used_bytes` of its device are taken by any process; on the
    CPU by this one. `free_bytes` are free for any process, `allocator_free_bytes` reserved by this rank's allocator and
    unused; `host_free_bytes` of main memory are free. Seconds are those of the last step, 0 before the first. In
    `waited_seconds` of them it waited for other ranks' tensors; None if unknown, as where the device replays a
    recording. `computed_seconds` is the median of the run of what this rank computed in a step; None if unknown."""

    used_bytes: int
    total_bytes: int
    weights: tuple[ModelMemory, ...] = ()
    step_seconds: float = 0.0
    waited_seconds: float | None = None
    computed_seconds: float | None = None
    graphs: Graphs = Graphs()
    free_bytes: int = 0
    allocator_free_bytes: int = 0
    host_free_bytes: int = 0

    @property
    def rank_bytes(self) -> int:
        """Returns the device memory of this rank: its models, and what its allocator has free."""
        return self.allocator_free_bytes + sum(model.device_bytes for model in self.weights)

    def other_models_bytes(self, fingerprint: str) -> int:
        """Returns the device memory of this rank for models other than the one with this fingerprint."""
        return sum(model.device_bytes for model in self.weights if model.fingerprint != fingerprint)

    def recorded_bytes(self, fingerprint: str) -> int:
        """Returns the device bytes of this model's recorded forwards: a run of it needs no others for its
        activations."""
        return sum(model.recorded for model in self.weights if model.fingerprint == fingerprint)
