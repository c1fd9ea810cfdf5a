"""ComfyUI's VAEs on this rank: each is loaded as it was in ComfyUI, or from its weights, and runs on its rows."""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from math import prod
from typing import Any

import comfy.sd
import torch
from torch import Tensor, nn

from ...architectures.autoencoders import COMPARED, kind_of, name_of
from ...engine.comm.collectives import refuse_on_all_ranks
from ...engine.comm.mesh import MeshDim, participating_ranks
from ...engine.comm.ranks import machine, machine_ranks, rank
from ...engine.rows.conversion import Conversion, error_limit, leave_undivided, run_tiles, share_of
from ...engine.rows.functions import Share
from ...engine.split.streams import chunk_sizes
from ...errors import Refused, Unsplittable
from ...jobs import Job, VAEJob
from ...loading.code_names import named
from ...loading.fingerprint import model_fingerprint
from ...loading.mapped import Mapped, calls_loader, with_attributes
from ...loading.random_states import random_states, set_random_states
from ...specs import ModelSpec, Parallelism
from ..models import Model
from ..progress import Progress

NO_LIMIT_GIB = 1e9
VOTE_EVERY = 32  # divided functions between two votes; a cancel waits for as many
VOTE_TILES = 4  # of each rank between two votes: ranks wait for rank 0 there, which blends
Trials = dict[tuple[ModelSpec, str, tuple[int, ...], int, bool], Refused | None]  # None for one that succeeded


class VAE(Model):
    """A VAE, whose network is never split: Conversion divides the functions of its forward as they run."""

    def split(self, parallelism: Parallelism) -> None:
        pass


def load(spec: ModelSpec, device: torch.device, on_progress: Callable[[float], None], job: Job) -> VAE:
    """Loads the VAE, or an empty one on machines that take no part in its jobs. Raises Refused."""
    assert isinstance(job, VAEJob)
    if machine():
        return VAE(spec, nn.Identity(), device=device)
    try:
        model = made_divisible(native_vae(spec, job.weights).first_stage_model)
    except OSError as error:
        raise Refused("vae.file", error=str(error)) from None
    return VAE(spec, model.eval().requires_grad_(False).to(device), device=device)


def native_vae(spec: ModelSpec, weights: Mapping[str, Tensor] | None) -> comfy.sd.VAE:
    """Returns ComfyUI's VAE of `spec`, in main memory. Raises Refused where this ComfyUI builds another one."""
    dtype = getattr(torch, spec.weight_dtype)
    if spec.loader:
        vae = _loaded_vae(spec)
    else:
        if weights is None:
            raise Refused("vae.weights")
        vae = comfy.sd.VAE(sd=dict(weights), metadata=json.loads(spec.arguments), dtype=dtype)
        if vae.first_stage_model is None:
            raise Refused("vae.unrecognised")
    vae.vae_dtype, model = dtype, vae.first_stage_model.to(dtype)
    if kind_of(model) != spec.kind:
        raise Refused("vae.kind", kind=kind_of(model))
    if model_fingerprint(model, dtype) != spec.weights_fingerprint:
        raise Refused("vae.changed")
    return vae


def _loaded_vae(spec: ModelSpec) -> comfy.sd.VAE:
    """Returns the VAE that a loader of ComfyUI's makes, which returns the VAE's patcher alone."""
    kind, made = comfy.sd.VAE, list[comfy.sd.VAE]()

    def make(*args: Any, **kwargs: Any) -> comfy.sd.VAE:
        made.append(kind(*args, **kwargs))
        return made[-1]

    with with_attributes(comfy.sd, VAE=make), calls_loader(Mapped):
        named(spec.loader)(*json.loads(spec.arguments))
    (vae,) = made
    return vae


def made_divisible(model: nn.Module) -> nn.Module:
    """Has the model slice by no rank's bytes, and modules that attend along time only run as they are."""
    # A limit too high to slice by: without any SeedVR2 would keep more than it needs between chunks of time.
    compared = COMPARED[kind_of(model)]
    if compared.limits:
        getattr(model, compared.limits)(NO_LIMIT_GIB, NO_LIMIT_GIB)
    for module in model.modules():
        if name_of(module) in compared.over_time:
            leave_undivided(module)
    return model


@contextmanager
def uniform_chunk_bytes(function: str, bytes_: int, local_rows: int, rows: int) -> Iterator[None]:
    """Replaces `function`, which returns the bytes by which a VAE splits time into chunks, with one that returns
    `bytes_` in proportion to a rank's `local_rows` of `rows`."""
    # So that all ranks split at the same frames.
    if not function:
        yield
        return
    module_name, _, name = function.partition(":")
    named(function)  # imports it
    local: dict[str, Any] = {name: lambda device: local_rows * max(1, bytes_ // rows)}
    with with_attributes(sys.modules[module_name], **local):
        yield


def run(trials: Trials, vae: VAE, job: VAEJob, progress: Progress) -> dict[str, Any]:
    """Returns {"random_states": as the run left them}. Raises Refused, on all ranks at the same place."""
    if machine():  # pixels are too large to send to other machines than ComfyUI's
        return {"random_states": random_states(vae.device)}
    shape, tiles = tuple(job.x.shape), COMPARED[vae.spec.kind].tiles
    parts = tiles.grid(vae.network, job.method, shape).count if tiles else max(shape[-2:]) // job.unit
    sizes = list(chunk_sizes(parts, tuple(job.shares) or len(machine_ranks())))
    if not sizes[0]:  # rank 0, which reports for all, has a row or tile
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    if (ranks := participating_ranks(sizes, vae.device)) is None:
        return {"random_states": random_states(vae.device)}
    # The full result is a view of ComfyUI's own memory.
    assert job.output is not None
    dtype, memory = getattr(torch, job.dtype), mmap.mmap(job.output, 0)
    flat = torch.frombuffer(memory, dtype=dtype, count=prod(job.shape), offset=job.offset * dtype.itemsize)
    output = flat.view(job.shape)
    if tiles is not None:
        set_random_states(job.random_states, vae.device)
        tick = _ticker(progress, ranks, VOTE_TILES * ranks.size, parts)
        run_tiles(vae.network, tiles, job.method, job.x, ranks, vae.device, place=output, tick=tick)
    else:
        share = share_of(job.x, job.unit, ranks)
        chunked = partial(uniform_chunk_bytes, COMPARED[vae.spec.kind].chunk_size, job.chunk_bytes)
        work = Conversion(vae.network, job.method, vae.device, chunked)
        _test(trials, vae.spec, work, job.x, share)
        set_random_states(job.random_states, vae.device)
        with _reporting_frames(progress, vae.network, job):
            work.run(job.x, share, place=share.split(output), tick=_ticker(progress, ranks, VOTE_EVERY))
    return {"random_states": random_states(vae.device)}


def _test(trials: Trials, spec: ModelSpec, work: Conversion, x: Tensor, share: Share) -> None:
    """Compares a small conversion on these ranks with one on a single rank, once for each spec, method and set of
    ranks. Raises Refused, on all ranks, where they differ by more than rounding."""
    if share.ranks.size == 1:
        return
    key = (spec, work.method, share.ranks.ranks, share.dim, x.ndim == 5 and x.shape[2] > 1)
    if key not in trials:
        trials[key] = None
        try:
            with refuse_on_all_ranks(share.ranks):
                try:
                    error, allowed = work.self_test(x, share), error_limit(x.dtype)
                except Unsplittable as refused:
                    raise Refused("vae.undivided", detail=refused.detail) from None
                if not error <= allowed:
                    raise Refused("vae.inexact", error=f"{error:.1e}", allowed=f"{allowed:.0e}")
        except Refused as failed:
            trials[key] = failed
    if (known := trials[key]) is not None:
        raise known.with_traceback(None)


@contextmanager
def _reporting_frames(progress: Progress, model: nn.Module, job: VAEJob) -> Iterator[None]:
    """Reports the frames of a video that are done, while a VAE runs in this context."""
    frames, layer = 0, None
    total = (job.shape if job.method == "decode" else job.x.shape)[2] if job.x.ndim == 5 else 0
    # Every frame passes the decoder's last convolution, or the encoder's first, once.
    part = getattr(model, "decoder" if job.method == "decode" else "encoder", None)
    if total > 1 and part is not None:
        convs = [module for module in part.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)]
        layer = convs[-1 if job.method == "decode" else 0] if convs else None

    def count_frames(_: nn.Module, args: Any, out: Any) -> None:
        nonlocal frames
        if (tensor := next((value for value in (out, *args) if isinstance(value, Tensor)), None)) is not None:
            frames += tensor.shape[2] if tensor.ndim == 5 else tensor.shape[0]
            if rank() == 0:
                progress.report_done(min(frames, total), total)

    with layer.register_forward_hook(count_frames) if layer else nullcontext():
        yield


def _ticker(progress: Progress, ranks: MeshDim, vote_every: int, tiles: int = 0) -> Callable[[], None]:
    """Returns a function to call before each divided function, or tile, which reports tiles, and cancels all ranks
    together."""
    ticks = count()

    def tick() -> None:
        done = next(ticks)
        progress.heartbeat()
        if done % vote_every == 0:
            progress.vote(ranks)
        if tiles and rank() == 0:
            progress.report_done(done + 1, tiles)

    return tick
