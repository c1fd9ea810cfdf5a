"""How long an evaluation takes by these degrees, from the sizes of network and sequence and what the devices measured;
and the shares that `auto` learns from how long each rank computed in real steps.

Ulysses waits for its all-to-alls; a ring hides a transfer behind the attention of the block it has, if the block is
long enough. Both cost packing, a ring also merging; and an evaluation lasts as long as its launches, at least."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..request import RotateMethod
from ..specs import ModelSpec, Parallelism, Placement
from .memory_model import MemoryModel
from .network_stats import Work, in_proportion
from .run_plan import DeviceProfile, Speed

# What an evaluation costs beside what the devices have measured. Calibrated by a rank's share of FLUX.1 dev at 1024 px
# and of Wan 2.1 14B at 480p on one H100 (2026-11-22), of whose matrix product the workers say 2 ** 49 FLOP/s.
#
# Shares of that speed that the linear layers reach, with all that is between them, and attention.
LINEAR_EFFICIENCY = 0.91
ATTENTION_EFFICIENCY = 0.62
# FLOP for each byte that goes through memory; no slower than main memory.
FLOP_PER_MEMORY_BYTE = 245
LEAST_MEMORY_BYTES_PER_SECOND = 1e10
# Passes over a tensor of a rank's tokens; those of float8 by counting reads and writes, not measured.
ULYSSES_PACKING_PASSES = 10  # and back
RING_PACKING_PASSES = 4
MERGING_PASSES = 5  # of one block
TO_FLOAT8_PASSES = 4.5
FROM_FLOAT8_PASSES = 3.5
# The device: kernels that are too small for it once the work is divided, and those of each block of a ring.
SPLIT_OVERHEAD_SECONDS_PER_LAYER = 215e-6
RING_BLOCK_OVERHEAD_SECONDS = 27.5e-6
# The host, where launches are not recorded; and what the one of host and device that is done sooner adds.
LAUNCH_SECONDS_PER_LAYER = 1.09e-3
LAUNCH_SECONDS_PER_LAYER_AND_RANK = 150e-6
LAUNCH_SECONDS_PER_LAYER_AND_BLOCK = 190e-6
LAG_SHARE = 0.1
# From these bytes of queries, keys and values of a rank Ulysses sends in two waves (MIN_HIDDEN_BYTES of Ulysses):
# half of its transfers then hide behind the other wave's attention.
TWO_WAVES_BYTES = 32 << 20
# From this speed all may send to all at once: through one bus or one network card they would wait for each other.
ALL_TO_ALL_BYTES_PER_SECOND = 3e10
# A network split by rows, estimated for SDXL and measured on no GPU yet: the device a message, with the small
# kernels around it; the host a norm, a convolution or an attention, and how many times as much where it is divided
# (on a CPU, 2026-11-23).
ROW_MESSAGE_SECONDS = 40e-6
ROW_LAUNCH_SECONDS = 0.2e-3
ROW_SPLIT_LAUNCH_FACTOR = 1.4
# Times the mean in which the slowest worker would do it all: what is less is the noise of a measurement.
HETEROGENEOUS_IMBALANCE = 1.1
MIN_IMBALANCE = 1.05  # the slowest rank's time in means of all ranks, from which the others wait for it
# Computing times of a step in seconds; shorter ones say nothing of the device, which several workers may share.
MIN_STEP_SECONDS, MIN_STEP_SECONDS_SHARED_DEVICE = 0.02, 0.4
RUNS_BEFORE_CHANGE = 2
log = logging.getLogger(__name__)


def evaluation_seconds(work: Work, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns the seconds of one evaluation of a data group's sequences on one rank, its transfers included: as long as
    the device takes, or as the host takes to launch it. A rotate_method that is `auto` counts as alltoall."""
    stages, busy = degrees.pipeline_degree, work.busy_share(degrees)
    work = replace(work, sequences=-(-work.sequences // degrees.data_degree))
    if work.network.row_levels:
        return _evaluation_seconds_by_rows(work, degrees, profile)
    network, ranks = work.network, degrees.context_parallel_size
    speed = LINEAR_EFFICIENCY * profile.flops_per_second
    linear = work.sequences * network.linear_flop(work.tokens) / ranks / speed
    device = linear + network.layers * attention_seconds(work, degrees, profile)
    host = 0.0
    if not work.recorded or stages > 1:
        launch = LAUNCH_SECONDS_PER_LAYER
        if ranks > 1:
            blocks = _ring_block_count(degrees) * (degrees.ring_degree > 1)
            launch += LAUNCH_SECONDS_PER_LAYER_AND_RANK * ranks + LAUNCH_SECONDS_PER_LAYER_AND_BLOCK * blocks
        host = network.layers * launch
    return (max(device, host) + LAG_SHARE * min(device, host)) / (stages * busy)


def _evaluation_seconds_by_rows(work: Work, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns the seconds of a network that is split by rows of its picture: all that is sent is waited for."""
    network, levels, ranks = work.network, work.network.row_levels, degrees.context_parallel_size
    if ranks > work.row_ranks:  # each computes all of it
        degrees, ranks = replace(degrees, ring_degree=1, ulysses_degree=1, shares=()), 1
    method, ring = degrees.options.rotate_method, degrees.ring_degree
    flop = network.linear_flop(work.tokens) / LINEAR_EFFICIENCY
    flop += network.attention_flop(work.tokens) / ATTENTION_EFFICIENCY
    if ranks > 1 and method == "tokens":  # each rank projects all keys and values
        pixels = ((level, work.tokens / 4**number) for number, level in enumerate(levels))
        keys = sum(4 * level.attentions * level.width**2 * count for level, count in pixels)
        flop += (ranks - 1) * keys / LINEAR_EFFICIENCY
    device = work.sequences * flop / ranks / profile.flops_per_second
    units = network.layers + sum(level.messages for level in levels)
    launch_seconds = ROW_LAUNCH_SECONDS * (ROW_SPLIT_LAUNCH_FACTOR if ranks > 1 else 1.0)
    host = 0.0 if work.recorded else units * launch_seconds
    if ranks > 1 and profile.bytes_per_second:
        # Messages of norms with the edges of rows, and of attentions over pixels.
        hops = 1 if method in ("allgather", "tokens") else ring - 1
        each = (hops if ring > 1 else 0) + (2 if degrees.ulysses_degree > 1 else 0)
        device += sum(level.messages + level.attentions * each for level in levels) * ROW_MESSAGE_SECONDS
        device += network.layers * attention_bytes(work, degrees) / profile.bytes_per_second
    return max(device, host) + LAG_SHARE * min(device, host)


def single_worker_seconds(work: Work, speed: Speed) -> float:
    """Returns how long this worker would compute, had it all of the work; 0 where its speed was not measured."""
    if not speed.products or not speed.attention:
        return 0.0
    linear, attention = work.network.linear_flop(work.tokens), work.network.attention_flop(work.tokens)
    return work.sequences * (linear / LINEAR_EFFICIENCY / speed.products + attention / speed.attention)


def single_worker_seconds_by_rank(work: Work, profile: DeviceProfile) -> list[float]:
    return [single_worker_seconds(work, speed) for speed in profile.ranks]


def are_measured(work: Work, placement: Placement, profile: DeviceProfile | None) -> bool:
    """Did each worker measure how fast it is by itself? Those that share a device take its time from each other."""
    if profile is None or placement.shared or len(profile.ranks) != placement.world_size:
        return False
    return all(single_worker_seconds_by_rank(work, profile))


def are_heterogeneous(work: Work, placement: Placement, profile: DeviceProfile | None) -> bool:
    """Did these workers measure that the slowest would hold the others up by equal shares?"""
    if profile is None or not are_measured(work, placement, profile):
        return False
    seconds = single_worker_seconds_by_rank(work, profile)
    return max(seconds) > HETEROGENEOUS_IMBALANCE * sum(seconds) / len(seconds)


def averaged(work: Work, degrees: Parallelism, profile: DeviceProfile) -> DeviceProfile:
    """Returns the profile of equal workers as slow as the one that computes longest by its share."""
    each, ranks = degrees.context_parallel_size, iter(single_worker_seconds_by_rank(work, profile))
    slowest = max(each * next(ranks) * share / sum(group) for group in degrees.cp_group_shares for share in group)
    at_one_flop = single_worker_seconds(work, Speed(products=1.0, attention=ATTENTION_EFFICIENCY))
    return replace(profile, flops_per_second=at_one_flop / slowest)


def times_as_fast(work: Work, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns how many times as fast a step is on these workers, which share out its work, as on one."""
    several = work.prompts_per_rank(degrees) * evaluation_seconds(work, degrees, profile)
    return work.prompts * evaluation_seconds(work, Parallelism(), profile) / several


def attention_bytes(work: Work, degrees: Parallelism) -> float:
    """Returns the bytes that a rank sends in one attention; where rows are split the mean of all attentions."""
    tensor_bytes: float = work.tensor_bytes
    if levels := work.network.row_levels:
        wide = sum(level.attentions * level.width * work.tokens / 4**number for number, level in enumerate(levels))
        tensor_bytes = work.sequences * wide * work.network.item_bytes / max(1, work.network.layers)
    all_to_all, per_hop = _sent_bytes(tensor_bytes, work, degrees)
    return all_to_all + per_hop * (degrees.ring_degree - 1)


def attention_seconds(work: Work, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns the seconds of one attention layer on one rank, its transfers included."""
    ring, ulysses = degrees.ring_degree, degrees.ulysses_degree
    share = work.tensor_bytes / (ring * ulysses)
    compute = 4 * work.sequences * work.tokens**2 * work.network.width / (ring * ulysses)
    compute /= ATTENTION_EFFICIENCY * profile.flops_per_second
    if degrees.context_parallel_size == 1 or not profile.bytes_per_second:  # a single worker has measured none
        return compute
    passes, small, float8 = 0.0, SPLIT_OVERHEAD_SECONDS_PER_LAYER, degrees.options.sends_float8
    if ulysses > 1:
        passes += ULYSSES_PACKING_PASSES
        passes += 4 * (TO_FLOAT8_PASSES + FROM_FLOAT8_PASSES) * float8
    if ring > 1:
        passes += RING_PACKING_PASSES + MERGING_PASSES * _ring_block_count(degrees)
        passes += 2 * (TO_FLOAT8_PASSES + FROM_FLOAT8_PASSES * (ring - 1)) * float8
        small += RING_BLOCK_OVERHEAD_SECONDS * _ring_block_count(degrees)
    speed = max(profile.flops_per_second / FLOP_PER_MEMORY_BYTE, LEAST_MEMORY_BYTES_PER_SECOND)
    # Then the transfers that no computation hides.
    block = compute / ring
    all_to_all, send_recv = (size / profile.bytes_per_second for size in _sent_bytes(work.tensor_bytes, work, degrees))
    if 3 * share >= TWO_WAVES_BYTES:
        all_to_all -= min(all_to_all, compute) / 2
    if degrees.options.rotate_method == "allgather":
        exposed = max(0.0, (ring - 1) * send_recv - block)
    else:
        exposed = (ring - 1) * max(0.0, send_recv - block)
    return compute + passes * share / speed + small + all_to_all + exposed


def _sent_bytes(tensor_bytes: float, work: Work, degrees: Parallelism) -> tuple[float, float]:
    """Returns what one rank sends for Ulysses (queries, keys, values, result), and in each hop of a ring (keys and
    values, or the tokens of both). `tensor_bytes`: one of these tensors on all ranks, as it is computed."""
    if degrees.options.sends_float8:  # a byte a number, and two more for each head
        tensor_bytes *= (1 + 2 * work.network.heads / work.network.width) / work.network.item_bytes
    share, ulysses = tensor_bytes / degrees.context_parallel_size, degrees.ulysses_degree
    ring_tensors = 1 if degrees.options.rotate_method == "tokens" else 2
    return 4 * share * (ulysses - 1) / ulysses, ring_tensors * share


def _ring_block_count(degrees: Parallelism) -> int:
    """Returns how many blocks of keys a rank attends to one by one."""
    return min(2, degrees.ring_degree) if degrees.options.rotate_method == "allgather" else degrees.ring_degree


def rotate_method_for(memory: MemoryModel, profile: DeviceProfile | None) -> RotateMethod:
    """Returns how a ring's keys and values go round where the request leaves it open.

    They are all-gathered where memory is enough for them, the link is fast, and less hiding costs less than fewer
    blocks gain. Those of a network that is split by rows, whose levels have few keys, are all-gathered, or sent
    as the tokens that they are made of: half the bytes, and each rank computes all keys."""
    work, degrees = memory.work, memory.degrees
    if degrees.options.rotate_method != "auto":
        return degrees.options.rotate_method
    if profile is None or not profile.bytes_per_second or degrees.ring_degree == 1 or not memory.may_all_gather():
        return "alltoall"
    methods: tuple[RotateMethod, ...] = ("allgather", "alltoall")
    if work.network.row_levels:
        of_keys = degrees.ulysses_degree > 1 or degrees.options.sends_float8  # tokens are sent as they are
        methods = ("allgather",) if of_keys else ("allgather", "tokens")
    elif profile.bytes_per_second < ALL_TO_ALL_BYTES_PER_SECOND:
        return "alltoall"
    seconds = evaluation_seconds if work.network.row_levels else attention_seconds
    return min(methods, key=lambda method: seconds(work, degrees.with_options(rotate_method=method), profile))


@dataclass(eq=False)
class _Tried:
    """The shares of one model by its degrees. An imbalance is the slowest rank's time in means of all ranks:
    `previous` is that before the last change, with its shares, and `accepted_imbalance` could not be improved."""

    shares: tuple[int, ...]
    behind: int = 0  # runs in a row
    previous: tuple[float, tuple[int, ...]] | None = None
    accepted_imbalance: float = 1.0


class ShareBalance:
    """The learnt shares of one group, for as long as it lives. They change only between runs, and settle: another share
    is another shape, to be recorded or compiled anew."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tried: dict[tuple[ModelSpec, Parallelism], _Tried] = {}  # by the degrees without shares

    def begin(self, model: ModelSpec, degrees: Parallelism) -> None:
        """Notes that a run of this model begins whose shares the user left to auto."""
        if degrees.pipeline_degree == 1:
            self._tried.setdefault((model.unpatched, replace(degrees, shares=())), _Tried(degrees.shares))

    def shares(self, model: ModelSpec) -> dict[Parallelism, tuple[int, ...]]:
        """Returns the shares of the next run of this model, by its degrees (without shares)."""
        return {degrees: tried.shares for (spec, degrees), tried in self._tried.items() if spec == model.unpatched}

    def learn(self, model: ModelSpec, degrees: Parallelism, seconds: Sequence[float | None]) -> None:
        """Takes the seconds that each rank computed in a step by these degrees; None if it could not measure."""
        known = [each for each in seconds if each is not None]
        shares = degrees.shares or (1,) * degrees.world_size
        least = MIN_STEP_SECONDS_SHARED_DEVICE if self._placement.shared else MIN_STEP_SECONDS
        if not known or len(known) < len(seconds) or max(known) < least:
            return
        tried = self._tried.get((model.unpatched, replace(degrees, shares=())))
        if tried is None or (tried.shares or (1,) * len(shares)) != shares:  # the user chose them
            return
        taking = [each for each, share in zip(known, shares, strict=True) if share]
        slowest, before = max(taking) * len(taking) / sum(taking), tried.shares
        tried.behind = tried.behind + 1 if slowest > MIN_IMBALANCE * tried.accepted_imbalance else 0
        if tried.behind < RUNS_BEFORE_CHANGE:
            return
        tried.behind = 0
        if tried.previous is not None and slowest >= tried.previous[0]:
            # Shares that gained nothing give way to the last ones, which stay: where work is not in proportion to
            # shares (whole heads), two might alternate forever.
            tried.accepted_imbalance, tried.shares = tried.previous
            tried.previous = None
        else:
            speeds = [work / took if took else 0.0 for work, took in zip(degrees.work_fractions, known, strict=True)]
            tried.previous, tried.accepted_imbalance = (slowest, tried.shares), 1.0
            tried.shares = in_proportion(speeds)
        if tried.shares != before:
            log.info(
                "[CP] worker %d computed %.0f %% longer than the average: from the next run on shares are %s",
                known.index(max(known)), 100 * (slowest - 1), ",".join(map(str, tried.shares)) or "equal",
            )  # fmt: skip
