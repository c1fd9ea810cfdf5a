"""The cost of a VAE's decode, here and divided: seconds, memory and traffic, in one line for a user. Arithmetic
only."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from ..architectures.autoencoders import DIFFUSION, ENGINE, HUNYUAN, KL, LTX, MINIMAX_H3, TileGrid
from ..errors import say
from ..planning.device_profile import DeviceProfile
from ..planning.misfit import GIB

LATENCY = 30e-6  # seconds a message between two GPUs waits for, whatever its size
LAUNCH = 8e-6  # seconds of host time a kernel: what more workers do not divide


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


WAN, WAN_22 = "comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2"
PICTURES = Decoding(flops=6.06e8, halo_bytes=6.4e4, exchanges=64, kernels=1100, width=512)
COUNTED: dict[tuple[str, int], Decoding] = {  # by class and the dims of a latent
    (f"{KL}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)", 4): PICTURES,
    (f"{ENGINE}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)", 4): PICTURES,
    (f"{KL}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)", 5): Decoding(
        flops=4.23e9, halo_bytes=1.41e5, exchanges=28, kernels=570, width=512, over_time=True
    ),
    (f"{ENGINE}({HUNYUAN}.vae_refiner.Encoder, {HUNYUAN}.vae_refiner.Decoder)", 5): Decoding(
        flops=2.50e10, halo_bytes=4.15e5, exchanges=18, kernels=280, width=1024
    ),
    (f"{WAN}.WanVAE({WAN}.Encoder3d, {WAN}.Decoder3d)", 5): Decoding(
        flops=2.07e9, halo_bytes=2.27e5, exchanges=41, kernels=790, width=384
    ),
    (f"{WAN_22}.WanVAE({WAN_22}.Encoder3d, {WAN_22}.Decoder3d)", 5): Decoding(
        flops=1.83e10, halo_bytes=5.87e5, exchanges=33, kernels=710, width=1024
    ),
    (f"{LTX}.VideoVAE({LTX}.Encoder, {LTX}.Decoder)", 5): Decoding(
        flops=9.80e9, halo_bytes=3.8e5, exchanges=15, kernels=300
    ),
    (MINIMAX_H3, 5): Decoding(flops=4.86e9, halo_bytes=6144, exchanges=1, kernels=900, width=36 * 2048),
}


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
    """Returns the seconds on `workers`; None for a class that was not counted. Halos hide behind convolutions,
    latencies do not."""
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
    exposed = max(0.0, traffic(decode, workers, counted) / profile.bytes_per_second - compute)
    return busy + LATENCY * counted.exchanges * decode.frames + exposed


def _tiles_seconds(decode: Decode, grid: TileGrid, counted: Decoding, workers: int, profile: DeviceProfile) -> float:
    """Returns the seconds of the worker with most tiles, and of those that the first one receives."""
    pixels = prod(grid.tile)
    compute = decode.latent[0] * (counted.flops * pixels + 4 * pixels**2 * counted.width) / profile.flops_per_second
    computed = ceil(grid.count / workers) * max(compute, LAUNCH * counted.kernels)
    received = grid.count - ceil(grid.count / workers)
    if not received or not profile.bytes_per_second:
        return computed
    tile_bytes = decode.latent[0] * counted.halo_bytes * pixels * decode.item_bytes / 2
    return computed + received * (tile_bytes / profile.bytes_per_second + LATENCY * counted.exchanges)


def traffic(decode: Decode, workers: int, counted: Decoding) -> float:
    """Returns the bytes that one rank sends: halos to two neighbours, its keys and values round the ring."""
    split, other = decode.sides
    scale = decode.item_bytes / 2
    halos = min(2, workers - 1) * counted.halo_bytes * decode.frames * other
    keys = 4 * counted.width * decode.frames * split * other / workers * (workers - 1)
    return scale * (halos + keys)


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
