"""Parts of a plan for its user, for CP Plan and the log: in words, why it was chosen, shares, memory, weights,
attention kernels; drawn, each rank's part of the sequence, the heads and the weights; and what a VAE's decode costs
here and divided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from ..architectures.autoencoders import DIFFUSION, ENGINE, HUNYUAN, KL, LTX, MINIMAX_H3, TileGrid
from ..errors import Sentence, listed, say
from ..planning.memory_model import GIB, Capacity, MemoryModel, size_in_words
from ..planning.network_stats import NetworkStats, Work
from ..planning.resolve import MIN_GAIN_TO_SWITCH, EncoderPlacement, EncoderSize
from ..planning.run_plan import DeviceProfile, Estimate, RunPlan
from ..request import ParallelRequest, are_uneven
from ..specs import BLOCK_BUFFERS, Placement, WeightPlacement

SHOWN = 4  # other plans, the best ones
Share = tuple[float, float]  # begin and end, as fractions of all
LATENCY = 30e-6  # seconds a message between two GPUs waits for, whatever its size
LAUNCH = 8e-6  # seconds of host time a kernel: what more workers do not divide
WAN, WAN_22 = "comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2"


def compared(plans: Sequence[RunPlan]) -> tuple[str, ...]:
    """Compares the first plan, which is taken, with the best others; () where none leaves out a device."""
    if not any(plan.left_out for plan in plans):
        return ()
    best, *others = plans
    others.sort(key=lambda plan: (bool(plan.left_out), plan.seconds))
    sentences = []
    for plan in others[:SHOWN]:
        seconds = f"{plan.seconds:.2f}"
        if plan.left_out and plan.seconds < math.inf:
            key = "unlike.leave" if plan.seconds < MIN_GAIN_TO_SWITCH * best.seconds else "unlike.without"
            sentences.append(say(key, device=", ".join(plan.left_out), seconds=seconds))
        elif not plan.left_out and plan.seconds == math.inf:
            sentences.append(say("unlike.nowhere"))
        elif not plan.left_out:
            sentences.append(say("unlike.halves" if plan.degrees.cfg_degree == 2 else "unlike.tokens", seconds=seconds))
    if not sentences or not (best.seconds or math.inf in [plan.seconds for plan in plans]):
        return ()
    names = listed(list(dict.fromkeys(sentences)))
    measured = say("unlike", seconds=f"{best.seconds:.2f}", others=names)
    first = measured if best.seconds else say("unlike.unmeasured", others=names)
    return (first, say("unlike.left", devices=", ".join(best.left_out))) if best.left_out else (first,)


def why_replicated(request: ParallelRequest, plan: RunPlan, network: NetworkStats) -> str:
    """Says why weights are replicated that were to be elsewhere; "" where they are as requested."""
    choice, degrees = request.weights, plan.degrees
    if choice in ("auto", plan.weights.mode):
        return ""
    if len(network.blocks) <= BLOCK_BUFFERS:
        return say("note.unfetched", weights=choice, name=network.name)
    key = "note.alone" if degrees.cfg_degree * degrees.data_degree == 1 else "note.alone.each"
    return say(key, weights=choice, name=network.name)


def unused(request: ParallelRequest, plan: RunPlan, network: str) -> str:
    """Says that shares divide nothing in a network that only shares out prompts; "" where they do."""
    if plan.degrees.shares or not are_uneven(request.shares) or plan.placement.world_size == 1:
        return ""
    return say("note.unused", shares=request.shares.strip(), name=network)


def memory(estimate: Estimate, placement: Placement, free: Sequence[int]) -> tuple[str, str]:
    """Returns the sentences on the memory that workers need at their peak."""
    needed, most_weights = estimate.needed_bytes_by_rank, max(estimate.weight_bytes_by_rank)
    values = {"needed": f"{max(needed) / GIB:.2f}", "weights": f"{most_weights / GIB:.2f}"}
    most = say("memory", **values, free=f"{min(free) / GIB:.2f}") if free else say("memory.unknown", **values)
    if len(set(needed)) == 1:
        return most, ""
    each = [f"{device} {size_in_words(size)}" for device, size in zip(placement.device_names, needed, strict=True)]
    if not free:
        return most, say("memory.each.unknown", each=", ".join(each))
    each = [f"{one} / {size_in_words(size)}" for one, size in zip(each, free, strict=True)]
    return most, say("memory.each", each=", ".join(each))


def weights(plan: RunPlan, work: Work, capacity: Capacity) -> tuple[str, ...]:
    """Returns the sentences on the weights that workers have, that they fetch, and how long they wait for them."""
    estimate, mode, degrees = plan.estimate, plan.weights.mode, plan.degrees
    if estimate is None:
        return ()
    if degrees.pipeline_degree > 1:
        return (say("weights.stages", outside=size_in_words(work.network.outside_bytes)),)
    if not estimate.fetched_bytes:
        return (say("weights.whole", mode=mode),)
    values = {"mode": mode, "workers": degrees.context_parallel_size, "fetched": f"{estimate.fetched_bytes / GIB:.2f}"}
    source, blocks = "weights.fetched" if mode == "offload" else "weights.gathered", len(work.network.blocks)
    if len(set(estimate.weight_bytes_by_rank)) > 1:
        resident = [plan.weights.resident_blocks_on(rank) for rank in range(plan.placement.world_size)]
        each = zip(plan.placement.device_names, estimate.weight_bytes_by_rank, resident, strict=True)
        listing = ", ".join(f"{device} {size_in_words(size)} ({count}/{blocks})" for device, size, count in each)
        sentence = say(f"{source}.each", each=listing, **values)
    else:
        weight_gib = f"{max(estimate.weight_bytes_by_rank) / GIB:.2f}"
        sentence = say(source, resident=plan.weights.resident_blocks, blocks=blocks, weights=weight_gib, **values)
    fetching = say("weights.unmeasured")
    if estimate.batch_seconds:
        prompts = 1 if plan.entries_per_call else work.prompts_per_rank(degrees)
        key = ("weights.waits" if estimate.exposed_seconds else "weights.hidden") + (".one" if prompts == 1 else "")
        seconds = {"seconds": f"{estimate.batch_seconds:.2f}", "exposed": f"{estimate.exposed_seconds:.2f}"}
        fetching = say(key, prompts=prompts, **seconds)
    return sentence, _why_not_replicated(plan, work, capacity), fetching


def _why_not_replicated(plan: RunPlan, work: Work, capacity: Capacity) -> str:
    """Says which devices replicated weights would fit, and which not; "" where they fit all or none."""
    model = MemoryModel(work=work, degrees=plan.degrees, capacity=capacity).with_one_prompt_per_batch
    needed = model.needed_bytes_by_rank(WeightPlacement())
    each = list(zip(plan.placement.device_names, model.budget_bytes_by_rank, needed, strict=True))
    fitting = [device for device, budget, size in each if budget is None or size <= budget]
    if len(fitting) in (0, len(each)):
        return ""
    device, budget, size = next(one for one in each if one[1] is not None and one[2] > one[1])
    sizes = {"needed": size_in_words(size), "free": size_in_words(budget or 0)}
    return say("weights.why", fitting=", ".join(fitting), device=device, **sizes)


def text_encoder(placed: EncoderPlacement, size: EncoderSize, devices: Sequence[str]) -> tuple[Sentence, ...]:
    """Says where a text encoder goes, and whether a network makes room for it."""
    named = [devices[rank] for rank in placed.ranks]
    each = [f"{name} {size_in_words(weights)}" for name, weights in zip(named, placed.weight_bytes, strict=True)]
    if placed.stages:
        where = say("encode.stages", parts=", ".join(each))
    elif placed.weights.mode == "offload":
        resident, blocks = placed.weights.resident_blocks, len(size.blocks)
        where = say("encode.offload", device=named[0], resident=resident, blocks=blocks)
    else:
        where = say("encode.whole", device=named[0], size=size_in_words(size.weights))
    return where, say("encode.beside" if placed.beside else "encode.instead")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one rank: `tokens` outside of attention, `heads` inside it; `lane` says which prompt or images."""

    rank: int
    device: str
    tokens: Share
    heads: Share
    weights: Share
    lane: str


def parts(plan: RunPlan, *, weights: Sequence[float] = (), stages: Sequence[Share] = ()) -> list[Part]:
    """Returns the parts in rank order: ranks are numbered through pipeline, data, cfg, ring, ulysses, the last one
    fastest. `weights` is the fraction of the weights on each device, (): all of them; these are the same ones unless
    they are sharded, or of `stages`."""
    degrees, devices = plan.degrees, plan.placement.devices * plan.placement.nnodes
    size, ulysses = degrees.context_parallel_size, degrees.ulysses_degree
    fractions = weights or (1.0,) * len(devices)
    drawn = []
    for rank, device in enumerate(devices):
        group, index = divmod(rank, size)
        shares = degrees.cp_group_shares[group]
        stage, in_stage = divmod(group, degrees.cfg_degree * degrees.data_degree)
        data, cfg = divmod(in_stage, degrees.cfg_degree)
        first = 0.0
        if plan.sharded:
            # The first shard of a cp group begins with the weights, the last one ends with them, and they overlap in
            # the weights that several ranks have in full.
            *others, last = fractions[rank - index :][:size]
            first = (1 - last) * sum(others[:index]) / sum(others) if sum(others) else 0.0
        lanes = []
        if degrees.pipeline_degree > 1:
            lanes.append(say("lane.stage", stage=stage + 1, stages=degrees.pipeline_degree))
        if degrees.data_degree > 1:
            lanes.append(say("lane.images", group=data + 1, groups=degrees.data_degree))
        if degrees.cfg_degree > 1:
            lanes.append(say(("lane.positive", "lane.negative")[cfg]))
        drawn.append(
            Part(
                rank=rank,
                device=device,
                tokens=_share(index, shares),
                heads=_share(rank % ulysses, [sum(shares[number::ulysses]) for number in range(ulysses)]),
                weights=stages[stage] if stages else (first, first + fractions[rank]),
                lane=listed(lanes) if lanes else "",
            )
        )
    return drawn


def _share(index: int, shares: Sequence[int]) -> Share:
    return sum(shares[:index]) / sum(shares), sum(shares[: index + 1]) / sum(shares)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A decoder at its real size, counted on fake tensors in 16 bit, as tests/rows/fake.py does it.

    `flops` is for a pixel of the latent (of a frame), `halo_bytes` what a rank sends to one neighbour for a frame and a
    pixel of the side that is not split; `exchanges` and `kernels` are of one frame; `width` is that of its attention.
    Where there are tiles `halo_bytes` are those of a pixel's decoded tile, and `kernels` and `exchanges` of one tile.
    """

    flops: float
    halo_bytes: float
    exchanges: float
    kernels: float
    width: int = 0
    over_time: bool = False  # attention sees the pixels of all frames


PICTURES = Decoding(flops=6.06e8, halo_bytes=6.4e4, exchanges=64, kernels=1100, width=512)
COUNTED: dict[tuple[str, int], Decoding] = {  # by class and the dims of a latent
    (f"{KL}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)", 4): PICTURES,
    (f"{ENGINE}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)", 4): PICTURES,
    (f"{KL}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)", 5):
        Decoding(flops=4.23e9, halo_bytes=1.41e5, exchanges=28, kernels=570, width=512, over_time=True),
    (f"{ENGINE}({HUNYUAN}.vae_refiner.Encoder, {HUNYUAN}.vae_refiner.Decoder)", 5):
        Decoding(flops=2.50e10, halo_bytes=4.15e5, exchanges=18, kernels=280, width=1024),
    (f"{WAN}.WanVAE({WAN}.Encoder3d, {WAN}.Decoder3d)", 5):
        Decoding(flops=2.07e9, halo_bytes=2.27e5, exchanges=41, kernels=790, width=384),
    (f"{WAN_22}.WanVAE({WAN_22}.Encoder3d, {WAN_22}.Decoder3d)", 5):
        Decoding(flops=1.83e10, halo_bytes=5.87e5, exchanges=33, kernels=710, width=1024),
    (f"{LTX}.VideoVAE({LTX}.Encoder, {LTX}.Decoder)", 5):
        Decoding(flops=9.80e9, halo_bytes=3.8e5, exchanges=15, kernels=300),
    (MINIMAX_H3, 5): Decoding(flops=4.86e9, halo_bytes=6144, exchanges=1, kernels=900, width=36 * 2048),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One decode of a latent [B, C, (T,) H, W] by a VAE of the class `kind`. `activation_bytes` is ComfyUI's own
    estimate for one process, `tile_bytes` that for one tile, of which `grid` has all."""

    kind: str
    latent: tuple[int, ...]
    weight_bytes: int
    activation_bytes: int
    item_bytes: int
    grid: TileGrid | None = None
    tile_bytes: int = 0

    @property
    def frames(self) -> int:
        return self.latent[0] * (self.latent[2] if len(self.latent) == 5 else 1)

    @property
    def sides(self) -> tuple[int, int]:
        """Returns the longer one, which is split, and the other."""
        return max(self.latent[-2:]), min(self.latent[-2:])


def decode_seconds(decode: Decode, workers: int, profile: DeviceProfile) -> float | None:
    """Returns the seconds on `workers`; None for an unknown class. Halos hide behind convolutions, latencies do not."""
    counted = COUNTED.get((decode.kind, len(decode.latent)))
    if counted is None or not profile.flops_per_second:
        return None
    if decode.grid is not None:
        return _tiles_seconds(decode, decode.grid, counted, workers, profile)
    split, other = decode.sides
    workers = min(workers, split)
    pixels = decode.frames * split * other
    attention = 4 * pixels**2 * counted.width / (1 if counted.over_time else decode.frames)
    compute = (counted.flops * pixels + attention) / profile.flops_per_second / workers
    busy = max(compute, LAUNCH * counted.kernels * decode.frames)
    if workers == 1 or not profile.bytes_per_second:
        return busy
    # A rank sends halos to two neighbours, and its keys and values round the ring.
    halos = min(2, workers - 1) * counted.halo_bytes * decode.frames * other
    keys = 4 * counted.width * pixels / workers * (workers - 1)
    sent = decode.item_bytes / 2 * (halos + keys)
    exposed = max(0.0, sent / profile.bytes_per_second - compute)
    return busy + LATENCY * counted.exchanges * decode.frames + exposed


def _tiles_seconds(decode: Decode, grid: TileGrid, counted: Decoding, workers: int, profile: DeviceProfile) -> float:
    """Returns the seconds of the worker with most tiles, and of those that the first one receives."""
    pixels, most = prod(grid.tile), ceil(grid.count / workers)
    compute = decode.latent[0] * (counted.flops * pixels + 4 * pixels**2 * counted.width) / profile.flops_per_second
    computed = most * max(compute, LAUNCH * counted.kernels)
    if grid.count == most or not profile.bytes_per_second:
        return computed
    tile_bytes = decode.latent[0] * counted.halo_bytes * pixels * decode.item_bytes / 2
    return computed + (grid.count - most) * (tile_bytes / profile.bytes_per_second + LATENCY * counted.exchanges)


def decode_line(decode: Decode, workers: int, profile: DeviceProfile | None) -> tuple[str, ...]:
    """Returns the sentences on a decode for CP Plan."""
    used = min(workers, decode.sides[0])
    full, part = decode.activation_bytes / GIB, decode.activation_bytes / used / GIB
    sizes = {"here": f"{full:.2f}", "weights": f"{decode.weight_bytes / GIB:.2f}", "share": f"{part:.2f}"}
    memory = say("decode", **sizes, workers=used)
    if decode.grid is not None:
        sizes["share"] = f"{decode.tile_bytes / GIB:.2f}"
        memory = say("decode.tiles", **sizes, workers=min(workers, decode.grid.count))
    on_one, several = (profile and decode_seconds(decode, count, profile) for count in (1, workers))
    if on_one is None or several is None:
        return (memory,)
    return memory, say("decode.seconds", alone=f"{on_one:.1f}", several=f"{several:.1f}")
