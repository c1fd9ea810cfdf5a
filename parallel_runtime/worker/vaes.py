"""ComfyUI's VAEs on this rank: each runs its own forward on its rows. Knows no VAE by name; comfy_loop makes them."""

from __future__ import annotations

import mmap
import os
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..autoencoders import COMPARED
from ..errors import Refused
from ..jobs import VAEJob
from ..random_states import random_states, set_random_states
from ..specs import ModelSpec, Parallelism
from .engine.exchange import any_of
from .engine.mesh import Axis, ranks_with
from .engine.streams import chunk_sizes
from .models import Model
from .pulse import Pulse
from .ranks import machine, neighbours
from .vae.converting import Conversion, limit, share_of
from .vae.share import Share
from .vae.watch import watching

Trial = tuple[ModelSpec, str, tuple[int, ...], int, bool]


class VAE(Model):
    """Nothing of it is cut: its forward runs under a mode that divides."""

    def divide(self, parallelism: Parallelism) -> None:
        pass


class VAEs:
    """What decodes and encodes. Only the ranks of ComfyUI's machine take part: pixels are not for a network."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trials: dict[Trial, str] = {}
        self._room: int | None = None

    def make_room(self, fd: int) -> None:
        """The memory for the result of the next request."""
        self.leave_room()
        self._room = fd

    def leave_room(self) -> None:
        if self._room is not None:
            os.close(self._room)
            self._room = None

    def __call__(self, vae: VAE, job: VAEJob, pulse: Pulse) -> dict[str, Any]:
        """Returns {"random_states": as the run left them}. Raises Refused, on all ranks at the same place."""
        if machine() == 0:
            self._run(vae, job, pulse)
        return {"random_states": random_states(self._device)}

    def _run(self, vae: VAE, job: VAEJob, pulse: Pulse) -> None:
        from .comfy_loop.autoencoder import chunked_alike  # ComfyUI exists only once its root is known

        ranks = ranks_with(_rows_of_each(max(job.x.shape[-2:]) // job.unit, tuple(job.shares)), self._device)
        if ranks is None:
            return
        share, compared = share_of(job.x, job.unit, ranks), COMPARED[vae.spec.kind]
        with chunked_alike(compared.chunk_size, job.chunk_bytes) as chunks:
            work = Conversion(vae.network, job.method, self._device, job.unit, compared.over_time, chunks)
            self._test(vae.spec, work, job.x, share)
            set_random_states(job.random_states, self._device)
            with watching(pulse, ranks, vae.network, job) as tick:
                work.run(job.x, share, place=self._place(job, share), tick=tick)

    def _test(self, spec: ModelSpec, work: Conversion, x: Tensor, share: Share) -> None:
        """Once for each class, way and set of ranks. Raises Refused, on all ranks, where the class fails."""
        if share.ranks.size == 1:
            return
        key = (spec, work.method, share.ranks.ranks, share.dim, x.ndim == 5 and x.shape[2] > 1)
        if key not in self._trials:
            self._trials[key] = _said(share.ranks, _fails(work, x, share))
        if self._trials[key]:
            raise Refused(self._trials[key])

    def _place(self, job: VAEJob, share: Share) -> Tensor:
        """This rank's rows of the result, in ComfyUI's own memory."""
        assert self._room is not None
        dtype, size = getattr(torch, job.dtype), prod(job.shape)
        memory = mmap.mmap(self._room, 0)
        whole = torch.frombuffer(memory, dtype=dtype, count=size, offset=job.offset * dtype.itemsize).view(job.shape)
        return share.cut(whole, whole.shape[share.dim] // sum(share.units))


def _rows_of_each(rows: int, shares: tuple[int, ...]) -> list[int]:
    """Of each rank of ComfyUI's machine. Rank 0 has one at least: it speaks for all."""
    sizes = list(chunk_sizes(rows, shares or len(neighbours())))
    if not sizes[0]:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    return sizes


def _fails(work: Conversion, x: Tensor, share: Share) -> str:
    try:
        apart = work.trial(x, share.ranks, share.dim)
    except Refused as refused:
        return f"{refused} cannot be divided"
    bar = limit(x.dtype)
    return "" if apart <= bar else f"its self-test on workers was off by {apart:.1e}, where {bar:.0e} is allowed"


def _said(ranks: Axis, refused: str) -> str:
    """This rank's objection, or that another one has one. Collective."""
    somebody = any_of(ranks, bool(refused))
    return refused or ("another worker could not" if somebody else "")
