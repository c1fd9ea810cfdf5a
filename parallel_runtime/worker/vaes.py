"""The VAEs of this rank, and the requests that use them. Knows no VAE by name; comfy_loop makes them."""

from __future__ import annotations

import gc
import mmap
import os
import time
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..autoencoders import COMPARED
from ..errors import Refused
from ..jobs import VAEJob
from ..random_states import random_states, set_random_states
from ..specs import VAESpec
from ..wire.bundles import read_bundle, write_bundle
from ..wire.channel import Channel
from ..wire.messages import Convert, Done
from .engine.exchange import any_of
from .engine.mesh import Axis, first_ranks
from .pulse import Cancelled, Pulse
from .ranks import machines, rank, world_size
from .vae.converting import convert, limit, share_of, trial
from .vae.share import Share
from .vae.watch import Watch

CPU = torch.device("cpu")
Trial = tuple[VAESpec, str, int, int, bool]


class VAEs:
    """Holds VAEs until the host says. Only the ranks of ComfyUI's machine take part: pixels are not for a network."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: dict[VAESpec, nn.Module] = {}
        self._trials: dict[Trial, str] = {}
        self._room: int | None = None

    def make_room(self, fd: int) -> None:
        """The memory for the result of the next request."""
        self._leave_room()
        self._room = fd

    def unload(self, spec: VAESpec, *, offload: bool) -> None:
        if offload and spec in self._models:
            self._models[spec].to(CPU)
        else:
            self._models.pop(spec, None)
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    @torch.inference_mode()
    def answer(self, request: Convert, bundle: int, channel: Channel) -> tuple[Done, int | None]:
        """Rank 0's bundle: {"refused": why these workers cannot, or "", "random_states": as the run left them}."""
        fields = read_bundle(bundle)
        assert fields.pop("kind") == VAEJob.__name__
        if rank() >= _ranks_here():
            return Done(request.job), None
        pulse = Pulse(channel, request.job)
        pulse.loading(0.0)
        started = time.monotonic()
        try:
            refused, loaded = self._try(request.vae, VAEJob(**fields), pulse)
        except Cancelled:
            return Done(request.job, cancelled=True), None
        finally:
            self._leave_room()
        done = Done(request.job, load_seconds=loaded - started, seconds=time.monotonic() - loaded)
        if rank():
            return done, None
        return done, write_bundle({"refused": refused, "random_states": random_states(self._device)})

    def _try(self, spec: VAESpec, job: VAEJob, pulse: Pulse) -> tuple[str, float]:
        """What all ranks say against it, and when it was loaded."""
        everybody = first_ranks(_ranks_here(), self._device)
        refused = _said(everybody, self._load(spec, job))
        loaded = time.monotonic()
        if refused:
            self._models.pop(spec, None)
            return refused, loaded
        try:
            self._run(spec, job, pulse)
        except Refused as error:  # of shapes, so all raise it, at the same place
            refused = str(error)
        return refused, loaded

    def _load(self, spec: VAESpec, job: VAEJob) -> str:
        """Why not, or ""."""
        from .comfy_loop.autoencoder import build  # ComfyUI exists only once its root is known

        try:
            if spec not in self._models:
                self._models[spec] = build(spec, job.weights, self._device)
            self._models[spec].to(self._device)
        except (Refused, OSError) as error:
            return str(error)
        return ""

    def _run(self, spec: VAESpec, job: VAEJob, pulse: Pulse) -> None:
        from .comfy_loop.autoencoder import chunked_alike

        rows = max(job.x.shape[-2:]) // job.unit
        count = min(_ranks_here(), rows)
        if rank() >= count:
            return
        ranks = first_ranks(count, self._device)
        share, compared, model = share_of(job.x, job.unit, ranks), COMPARED[spec.kind], self._models[spec]
        with chunked_alike(compared.chunk_size, job.chunk_bytes) as chunks:
            self._test(spec, job, share, chunks)
            chunks(share.own, sum(share.units))
            set_random_states(job.random_states, self._device)
            watch = Watch(pulse, ranks, model, job)
            with watch:
                convert(
                    model,
                    job.method,
                    job.x,
                    share,
                    unit=job.unit,
                    place=self._place(job, share),
                    tick=watch.tick,
                    over_time=compared.over_time,
                    device=self._device,
                )

    def _test(self, spec: VAESpec, job: VAEJob, share: Share, chunks: Any) -> None:
        """Once for each class, way and number of ranks. Raises Refused, on all ranks, where the class fails."""
        count = share.ranks.size
        key = (spec, job.method, count, share.dim, job.x.ndim == 5 and job.x.shape[2] > 1)
        if count == 1:
            return
        if key not in self._trials:
            self._trials[key] = _said(share.ranks, self._fails(spec, job, share, chunks))
        if self._trials[key]:
            raise Refused(self._trials[key])

    def _fails(self, spec: VAESpec, job: VAEJob, share: Share, chunks: Any) -> str:
        model, over_time = self._models[spec], COMPARED[spec.kind].over_time
        try:
            apart = trial(
                model,
                job.method,
                job.x,
                job.unit,
                share.ranks,
                share.dim,
                device=self._device,
                over_time=over_time,
                chunks=chunks,
            )
        except Refused as refused:
            return f"{refused} cannot be divided"
        bar = limit(job.x.dtype)
        return "" if apart <= bar else f"its self-test on workers was off by {apart:.1e}, where {bar:.0e} is allowed"

    def _place(self, job: VAEJob, share: Share) -> Tensor:
        """This rank's rows of the result, in ComfyUI's own memory."""
        assert self._room is not None
        dtype, size = getattr(torch, job.dtype), prod(job.shape)
        memory = mmap.mmap(self._room, 0)
        whole = torch.frombuffer(memory, dtype=dtype, count=size, offset=job.offset * dtype.itemsize).view(job.shape)
        return share.cut(whole, whole.shape[share.dim] // sum(share.units))

    def _leave_room(self) -> None:
        if self._room is not None:
            os.close(self._room)
            self._room = None


def _ranks_here() -> int:
    return world_size() // machines()


def _said(ranks: Axis, refused: str) -> str:
    """This rank's objection, or that another one has one. Collective."""
    somebody = any_of(ranks, bool(refused))
    return refused or ("another worker could not" if somebody else "")
