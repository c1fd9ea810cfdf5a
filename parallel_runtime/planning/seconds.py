"""How long an evaluation takes by these degrees, from the sizes of network and sequence and what the devices measured.

Ulysses waits for its all-to-alls; a ring hides a transfer behind the attention of the block it has, if the block is
long enough. Both cost packing, a ring also merging; and an evaluation lasts as long as its launches, at least."""

from dataclasses import replace

from ..request import RotateMethod
from ..specs import Parallelism, Placement
from .memory_model import MemoryModel
from .network_stats import Work, busy_share
from .run_plan import DeviceProfile, Speed
from .work_shares import in_proportion

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


def evaluation_seconds(work: Work, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns the seconds of one evaluation of a data group's sequences on one rank, its transfers included: as long as
    the device takes, or as the host takes to launch it. A rotate_method that is `auto` counts as alltoall."""
    stages, busy = degrees.pipeline_degree, busy_share(work, degrees)
    work = replace(work, sequences=-(-work.sequences // degrees.data_degree))
    if work.network.row_levels:
        return _evaluation_seconds_by_rows(work, degrees, profile)
    network, ranks = work.network, degrees.context_parallel_size
    speed = LINEAR_EFFICIENCY * profile.flops_per_second
    linear = work.sequences * network.linear_flop(work.tokens) / ranks / speed
    device = linear + network.layers * attention_seconds(work, degrees, profile)
    host = 0.0 if work.recorded and stages == 1 else network.layers * _launch_seconds(degrees)
    return (max(device, host) + LAG_SHARE * min(device, host)) / (stages * busy)


def _evaluation_seconds_by_rows(work: Work, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns the seconds of a network that is split by rows of its picture: all that is sent is waited for."""
    network, ranks = work.network, degrees.context_parallel_size
    if ranks > work.row_ranks:  # each computes all of it
        degrees, ranks = replace(degrees, ring_degree=1, ulysses_degree=1, shares=()), 1
    flop = network.linear_flop(work.tokens) / LINEAR_EFFICIENCY
    flop += network.attention_flop(work.tokens) / ATTENTION_EFFICIENCY
    if ranks > 1 and degrees.options.rotate_method == "tokens":
        flop += (ranks - 1) * network.key_flop(work.tokens) / LINEAR_EFFICIENCY
    device = work.sequences * flop / ranks / profile.flops_per_second
    units = network.layers + sum(level.messages for level in network.row_levels)
    launch_seconds = ROW_LAUNCH_SECONDS * (ROW_SPLIT_LAUNCH_FACTOR if ranks > 1 else 1.0)
    host = 0.0 if work.recorded else units * launch_seconds
    if ranks > 1 and profile.bytes_per_second:
        device += _row_exchange_seconds(work, degrees, profile)
    return max(device, host) + LAG_SHARE * min(device, host)


def _row_exchange_seconds(work: Work, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns the seconds of all messages of a rank: norms with the edges of rows, and attentions over pixels."""
    ring, ulysses, network = degrees.ring_degree, degrees.ulysses_degree, work.network
    hops = 1 if degrees.options.rotate_method in ("allgather", "tokens") else ring - 1
    each = (hops if ring > 1 else 0) + (2 if ulysses > 1 else 0)
    messages = sum(level.messages + level.attentions * each for level in network.row_levels)
    transfer = network.layers * attention_bytes(work, degrees) / profile.bytes_per_second
    return messages * ROW_MESSAGE_SECONDS + transfer


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


def shares_by_speed(work: Work, profile: DeviceProfile) -> tuple[int, ...]:
    """Returns shares in proportion to what each of these workers measured."""
    return in_proportion([1 / seconds for seconds in single_worker_seconds_by_rank(work, profile)])


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
    all_to_all, per_hop = _sent_bytes(work.attention_tensor_bytes * _sent_share(work, degrees), degrees)
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
    return compute + passes * share / speed + small + _exposed_transfer(work, compute, degrees, profile)


def _exposed_transfer(work: Work, compute: float, degrees: Parallelism, profile: DeviceProfile) -> float:
    """Returns the seconds of transfers that no computation hides."""
    ring, block = degrees.ring_degree, compute / degrees.ring_degree
    sent = work.tensor_bytes * _sent_share(work, degrees)
    all_to_all, send_recv = (size / profile.bytes_per_second for size in _sent_bytes(sent, degrees))
    if 3 * work.tensor_bytes / degrees.context_parallel_size >= TWO_WAVES_BYTES:
        all_to_all -= min(all_to_all, compute) / 2
    if degrees.options.rotate_method == "allgather":
        return all_to_all + max(0.0, (ring - 1) * send_recv - block)
    return all_to_all + (ring - 1) * max(0.0, send_recv - block)


def _sent_share(work: Work, degrees: Parallelism) -> float:
    """Returns the share of a tensor's bytes that travels: in float8 a byte a number, and two more for each head."""
    network = work.network
    if not degrees.options.sends_float8:
        return 1.0
    return (1 + 2 * network.heads / network.width) / network.item_bytes


def _sent_bytes(tensor_bytes: float, degrees: Parallelism) -> tuple[float, float]:
    """Returns what one rank sends for Ulysses (queries, keys, values, result), and in each hop of a ring (keys and
    values, or the tokens of both). `tensor_bytes`: one of these tensors on all ranks."""
    share, ulysses = tensor_bytes / degrees.context_parallel_size, degrees.ulysses_degree
    ring_tensors = 1 if degrees.options.rotate_method == "tokens" else 2
    return 4 * share * (ulysses - 1) / ulysses, ring_tensors * share


def _ring_block_count(degrees: Parallelism) -> int:
    """Returns how many blocks of keys a rank attends to one by one."""
    return min(2, degrees.ring_degree) if degrees.options.rotate_method == "allgather" else degrees.ring_degree


def _launch_seconds(degrees: Parallelism) -> float:
    """Returns the seconds that the host takes to launch a layer."""
    if (ranks := degrees.context_parallel_size) == 1:
        return LAUNCH_SECONDS_PER_LAYER
    blocks = _ring_block_count(degrees) * (degrees.ring_degree > 1)
    divided = LAUNCH_SECONDS_PER_LAYER_AND_RANK * ranks + LAUNCH_SECONDS_PER_LAYER_AND_BLOCK * blocks
    return LAUNCH_SECONDS_PER_LAYER + divided


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
