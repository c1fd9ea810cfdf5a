"""One VAE of the zoo, whole and divided."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures.autoencoders import COMPARED, kind_of
from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.rows.conversion import Conversion, run_tiles
from parallel_runtime.engine.rows.functions import Share
from parallel_runtime.engine.split.streams import chunk_sizes
from parallel_runtime.worker.comfy_loop.autoencoder import made_divisible, uniform_chunk_bytes

from ..zoo import vaes

CPU = torch.device("cpu")
CHUNK_BYTES = 60_000  # so that even these tiny videos are cut in time
Divide = Callable[[int, Callable[[int], Any]], list[Any]]


def run(name: str, method: str, dim: int, world: int, options: dict[str, Any], divide: Divide) -> dict[str, Any]:
    """{"apart": the worst rank's relative L2 distance, "noise": are the generators where one process leaves its}."""
    dtype = getattr(torch, options.get("dtype", "float32"))
    if method == "kind":
        return {"kind": kind_of(_model(name, dtype))}
    model, x = _model(name, dtype), _input(name, method, dtype, tuple(options.get("latent", ())))
    unit = 1 if method == "decode" else vaes.CASES[name].ratio
    with torch.inference_mode():
        full, state = _full(name, method, dtype, tuple(options.get("latent", ())))
    if COMPARED[kind_of(model)].tiles is not None:
        return _by_tiles(model, method, x, full, options.get("shares") or [1] * world, divide)
    units = chunk_sizes(x.shape[dim] // unit, world)

    def work(rank: int) -> tuple[float, bool]:
        share = Share(ranks=MeshDim(size=world, index=rank, ranks=tuple(range(world))), dim=dim, units=units)
        made = _converted(made_divisible(model), method, x, share, fair=not options.get("own_chunks"))
        wanted = share.split(full)
        assert made.shape == wanted.shape, f"{tuple(made.shape)} where {tuple(wanted.shape)} was expected"
        apart = float((made.float() - wanted.float()).norm() / wanted.float().norm())
        return apart, torch.equal(torch.get_rng_state(), state)

    answers = divide(world, work)
    return {"apart": max(apart for apart, _ in answers), "noise": all(same for _, same in answers)}


def _by_tiles(
    model: nn.Module, method: Any, x: Tensor, full: Tensor, shares: list[int], divide: Divide
) -> dict[str, Any]:
    """{"apart": 0 where rank 0's is ComfyUI's to the bit, "made": how many tiles each rank computed, "counted": how
    many there are by the grid, "frames": the result's by the grid, and in truth}."""
    tiles, world = COMPARED[kind_of(model)].tiles, len(shares)
    assert tiles is not None

    def work(rank: int) -> tuple[float, int]:
        ranks = MeshDim(size=world, index=rank, ranks=tuple(range(world)), shares=tuple(shares))
        name, made = getattr(tiles, method), list[tuple[int, ...]]()
        compute = getattr(model, name)

        def counted(tile: Tensor) -> Tensor:
            made.append(tuple(tile.shape[2:]))
            out: Tensor = compute(tile)
            return out

        setattr(model, name, counted)
        place = torch.full(full.shape, torch.nan)
        run_tiles(model, tiles, method, x, ranks, CPU, place=place)
        assert {*made} <= {grid.tile}
        return float("inf") if rank == 0 and not torch.equal(place, full) else 0.0, len(made)

    grid = tiles.grid(model, method, tuple(x.shape))
    answers = divide(world, work)
    counts = {"made": [made for _, made in answers], "counted": grid.count, "frames": [grid.frames, full.shape[2]]}
    return {"apart": max(apart for apart, _ in answers), "noise": True, **counts}


def _converted(model: nn.Module, method: Any, x: Tensor, share: Share, fair: bool = True) -> Tensor:
    torch.manual_seed(7)
    if COMPARED[kind_of(model)].tiles is not None:  # as ComfyUI calls it
        made: Tensor = getattr(model, method)(x)
        return made
    chunked = functools.partial(uniform_chunk_bytes, COMPARED[kind_of(model)].chunk_size, CHUNK_BYTES)
    if fair:
        return Conversion(model, method, CPU, chunked).run(x, share)
    with chunked(1, 1):
        return Conversion(model, method, CPU).run(x, share)


@functools.lru_cache(2)
def _model(name: str, dtype: torch.dtype) -> nn.Module:
    return vaes.random_weights(vaes.CASES[name].make()).to(dtype)


@functools.lru_cache(2)
def _full(name: str, method: str, dtype: torch.dtype, latent: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """And the state of the random generator after it."""
    model, x = _model(name, dtype), _input(name, method, dtype, latent)
    alone = Share(ranks=MeshDim(), dim=-2, units=(x.shape[-2],))
    made = _converted(model, method, x, alone)
    return made.clone(), torch.get_rng_state()


def _input(name: str, method: str, dtype: torch.dtype, latent: tuple[int, ...]) -> Tensor:
    """`latent`: another size than the zoo's; of an encoder's input its third is the frames of pixels."""
    case, shape = vaes.CASES[name], latent or vaes.CASES[name].latent
    if method == "encode":
        frames = (latent[2] if latent else case.frames or 1,) if len(shape) == 5 else ()
        shape = (shape[0], 3, *frames, shape[-2] * case.ratio, shape[-1] * case.ratio)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
