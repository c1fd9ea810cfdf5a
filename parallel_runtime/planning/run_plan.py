"""What planning starts from, and what it gives: how a run is divided and among whom, and what that is estimated to need
and to take.

The inputs are what the user asked for, the network, and what devices measured when their workers met: how fast each
computes, and how fast they exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..accelerators import CUDA
from ..request import ParallelRequest, are_automatic, parse_devices
from ..specs import Parallelism, Placement, WeightPlacement
from .memory_model import UNLIMITED, Capacity, MemoryModel
from .network_stats import NetworkStats, Work

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
            shape, shares = self.degrees.stage_mesh_shape, self.degrees.world_size
            workers = self.placement.world_size
            raise ValueError(f"degrees {shape} make {shares} shares, and there are {workers} workers")

    @property
    def seconds(self) -> float:
        """Returns the seconds of evaluating all prompts once; infinity where it does not fit."""
        if self.estimate is None:
            return 0.0
        return self.estimate.seconds if self.estimate.fits else float("inf")

    @property
    def work_percent(self) -> list[tuple[str, int]]:
        """Returns each worker's device with its share of all the work in percent."""
        devices, fractions = self.placement.devices * self.placement.nnodes, self.degrees.work_fractions
        return [(device, round(100 * part)) for device, part in zip(devices, fractions, strict=True)]

    @property
    def sharded(self) -> bool:
        return self.weights.mode == "shard"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """FLOP/s of one worker, of matrix products and in attention; 0 for not measured."""

    products: float
    attention: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Bytes/s between two workers, FLOP/s of one, bytes/s from main memory while all copy, and each rank's speed."""

    bytes_per_second: float
    flops_per_second: float
    host_bytes_per_second: float = 0.0
    ranks: tuple[Speed, ...] = ()

    def of(self, ranks: Sequence[int]) -> DeviceProfile:
        """Returns the profile of these ranks; () for all of them."""
        if not self.ranks or not ranks:
            return self
        speeds = tuple(self.ranks[rank] for rank in ranks)
        return replace(self, ranks=speeds, flops_per_second=min(speed.products for speed in speeds))


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """`request`, for a `network`, on a host with `gpus` visible GPUs of a `kind`.

    A network without a split plan shares out prompts and images only; to split one by rows of its picture pays
    for large pictures only. `guided`: positive and negative prompt are both evaluated, by workers of their own unless
    something sees all prompts and images at once (`batch_coupled`); otherwise the workers of cfg_degree join the
    sequence, or the entries of the batch.

    The rest is known when a run begins. `profile` and `capacity` are of all devices that the request may use,
    `profiles` of groups that have met. `live` are the running workers, `shares` those that they have learnt by degrees
    (without shares), `before` where they have the weights; `keeps_placement`: these stay there. `only` are the workers
    that a plan is for, None: any. `compared`: fewer devices are candidates even if the user named all."""

    request: ParallelRequest
    network: NetworkStats = field(default_factory=NetworkStats)
    gpus: int
    kind: str = CUDA.kind
    guided: bool = False
    batch_coupled: bool = False
    work: Work | None = None
    profile: DeviceProfile | None = None
    profiles: Mapping[Placement, DeviceProfile] = field(default_factory=dict)
    capacity: Capacity = UNLIMITED
    live: Placement | None = None
    shares: Mapping[Parallelism, tuple[int, ...]] = field(default_factory=dict)
    before: WeightPlacement | None = None
    keeps_placement: bool = False
    only: Placement | None = None
    compared: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """Returns the devices that the request lists, or all; () for "the CPU, as often as needed". Raises Refused."""
        return parse_devices(self.request.devices, self.gpus, self.kind)

    def profile_of(self, plan: RunPlan) -> DeviceProfile | None:
        """Returns what the workers of `plan` measured together, else among those of all devices."""
        known = self.profiles.get(plan.placement)
        return known if known is not None or self.profile is None else self.profile.of(plan.ranks)

    def memory_of(self, plan: RunPlan) -> MemoryModel:
        """Returns the MemoryModel of an evaluation by `plan`."""
        assert self.work is not None, "memory goes by sizes"
        capacity = self.capacity.of(plan.ranks)
        work = replace(self.work, prompts=1) if plan.entries_per_call else self.work
        automatic = self.request.weights == "auto"
        return MemoryModel(work=work, degrees=plan.degrees, capacity=capacity, automatic=automatic)

    @property
    def has_no_ring(self) -> bool:
        """Must each worker see all keys of its heads? Blocks of a ring cannot be merged, or a pipeline has none."""
        return bool(self.network.no_lse) or self.request.pipeline_degree > 1

    @property
    def sequence_degrees_open(self) -> bool:
        """Does the request leave open how a sequence is split?"""
        return not self.request.ring_degree and not self.request.ulysses_degree

    @property
    def is_coupled(self) -> bool:
        """Does something see all images of a prompt at once, so that groups of workers cannot have some each?"""
        return self.batch_coupled or self.network.images_coupled

    @property
    def may_split_prompts(self) -> bool:
        """May some workers evaluate the positive prompt, and others the negative one?"""
        return self.guided and not self.batch_coupled and self.request.cfg_degree != 1

    @property
    def may_leave_devices(self) -> bool:
        """May a plan do without some of the devices?"""
        return self.automatic_devices or (bool(self.network.row_levels) and self.sequence_degrees_open)

    @property
    def automatic_devices(self) -> bool:
        """Does the request leave open the devices, the degrees and the shares?"""
        request = self.request
        named = request.devices.strip(" ,") or request.ring_degree or request.ulysses_degree or request.cfg_degree
        only_splits = request.data_degree <= 1 and request.pipeline_degree <= 1 and request.nnodes == 1
        return not named and only_splits and are_automatic(request.shares) and self.network.divisible
