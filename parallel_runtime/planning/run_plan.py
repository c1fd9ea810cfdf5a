"""How a run is divided and among whom, and what that is estimated to need and to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..specs import Parallelism, Placement, WeightPlacement

REPLICATED = WeightPlacement()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The seconds and bytes of a RunPlan.

    `seconds` are those of evaluating all prompts once, 0 where nothing was measured; `batch_seconds` those of one
    batch, of which a rank waits `exposed_seconds` for the weights that it fetches. Buffers include the keys and values
    that token patches keep. `fits`: each rank may take what it needs, and main memory has enough. `fetch_is_fast`:
    weights are not fetched over a slow link."""

    weight_bytes_by_rank: tuple[int, ...]
    activation_bytes_by_rank: tuple[int, ...]
    buffer_bytes_by_rank: tuple[int, ...]
    fits: bool = True
    fetched_bytes: int = 0
    seconds: float = 0.0
    batch_seconds: float = 0.0
    exposed_seconds: float = 0.0
    fetch_is_fast: bool = True

    @property
    def workspace_bytes_by_rank(self) -> tuple[int, ...]:
        """Returns the bytes that each rank needs besides the weights at rest."""
        return tuple(map(sum, zip(self.activation_bytes_by_rank, self.buffer_bytes_by_rank, strict=True)))

    @property
    def needed_bytes_by_rank(self) -> tuple[int, ...]:
        """Returns the bytes that each rank needs at its peak."""
        return tuple(map(sum, zip(self.weight_bytes_by_rank, self.workspace_bytes_by_rank, strict=True)))


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How one run is divided: one rank of `placement` for each share of `degrees`.

    `weights` says where these are at rest. `entries_per_call` of a batch are evaluated at once, 0: all, those of
    several prompts too. `left_out` are the devices that it does without, `ranks` its own ones among all devices, ():
    all. `runners_up` are the best plans with other devices and with other cfg_degrees."""

    degrees: Parallelism
    placement: Placement
    weights: WeightPlacement = REPLICATED
    entries_per_call: int = 0
    left_out: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    estimate: Estimate | None = None
    runners_up: tuple[RunPlan, ...] = ()

    def __post_init__(self) -> None:
        if self.degrees.world_size != self.placement.world_size:
            raise ValueError(
                f"degrees {self.degrees.stage_mesh_shape} make {self.degrees.world_size} shares, and there are "
                f"{self.placement.world_size} workers"
            )

    @property
    def seconds(self) -> float:
        """Returns the seconds of evaluating all prompts once; infinity where it does not fit."""
        if self.estimate is None:
            return 0.0
        return self.estimate.seconds if self.estimate.fits else float("inf")

    def on_subset(self, devices: tuple[str, ...], ranks: Sequence[int]) -> RunPlan:
        """Returns this plan as one that has the ranks `ranks` of all `devices`, and leaves the others out."""
        left_out = tuple(device for rank, device in enumerate(devices) if rank not in ranks)
        return replace(self, ranks=tuple(ranks), left_out=left_out)

    @property
    def sharded(self) -> bool:
        return self.weights.mode == "shard"
