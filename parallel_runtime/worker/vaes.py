"""ComfyUI's VAEs on this rank: each runs its own forward on its rows. Knows no VAE by name; comfy_loop makes them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures.autoencoders import COMPARED
from ..engine.comm.mesh import MeshDim, participating_ranks
from ..engine.comm.ranks import machine, machine_ranks
from ..engine.comm.votes import refuse_on_all_ranks
from ..engine.rows.conversion import Conversion, error_limit, share_of
from ..engine.rows.row_share import Share
from ..engine.split.streams import chunk_sizes
from ..errors import Refused
from ..jobs import VAEJob
from ..loading.random_states import random_states, set_random_states
from ..specs import ModelSpec, Parallelism
from .models import Model
from .process.progress import Progress

VOTE_EVERY = 32  # divided functions between two votes; a cancel waits for as many
TrialKey = tuple[ModelSpec, str, tuple[int, ...], int, bool]


class VAE(Model):
    """A VAE, whose network is never split: Conversion divides the functions of its forward as they run."""

    def split(self, parallelism: Parallelism) -> None:
        pass


class VAEs:
    """Runs VAEJobs, on the ranks of ComfyUI's machine alone: pixels are too large to send to other machines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trials: dict[TrialKey, Refused | None] = {}
        self._output: int | None = None

    def map_output(self, fd: int) -> None:
        """Sets the memory `fd` that the next request's result is written to."""
        self.close_output()
        self._output = fd

    def close_output(self) -> None:
        if self._output is not None:
            os.close(self._output)
            self._output = None

    def __call__(self, vae: VAE, job: VAEJob, progress: Progress) -> dict[str, Any]:
        """Returns {"random_states": as the run left them}. Raises Refused, on all ranks at the same place."""
        if machine() == 0:
            self._run(vae, job, progress)
        return {"random_states": random_states(self._device)}

    def _run(self, vae: VAE, job: VAEJob, progress: Progress) -> None:
        from .comfy_loop.autoencoder import uniform_chunk_bytes  # ComfyUI exists only once its root is known

        ranks = participating_ranks(_rows_by_rank(max(job.x.shape[-2:]) // job.unit, tuple(job.shares)), self._device)
        if ranks is None:
            return
        share = share_of(job.x, job.unit, ranks)
        chunked = partial(uniform_chunk_bytes, COMPARED[vae.spec.kind].chunk_size, job.chunk_bytes)
        work = Conversion(vae.network, job.method, self._device, chunked)
        self._test(vae.spec, work, job.x, share)
        set_random_states(job.random_states, self._device)
        with report_progress(progress, ranks, vae.network, job) as tick:
            work.run(job.x, share, place=self._output_rows(job, share), tick=tick)

    def _test(self, spec: ModelSpec, work: Conversion, x: Tensor, share: Share) -> None:
        """Compares a small conversion on these ranks with one on a single rank, once for each spec, method and set of
        ranks. Raises Refused, on all ranks, where they differ."""
        if share.ranks.size == 1:
            return
        key = (spec, work.method, share.ranks.ranks, share.dim, x.ndim == 5 and x.shape[2] > 1)
        if key not in self._trials:
            self._trials[key] = None
            try:
                with refuse_on_all_ranks(share.ranks):
                    _compare(work, x, share)
            except Refused as failed:
                self._trials[key] = failed
        if (refused := self._trials[key]) is not None:
            raise refused.with_traceback(None)

    def _output_rows(self, job: VAEJob, share: Share) -> Tensor:
        """Returns this rank's rows of the result, as a view of ComfyUI's own memory."""
        assert self._output is not None
        dtype, size = getattr(torch, job.dtype), prod(job.shape)
        memory = mmap.mmap(self._output, 0)
        output = torch.frombuffer(memory, dtype=dtype, count=size, offset=job.offset * dtype.itemsize).view(job.shape)
        return share.split(output)


def _rows_by_rank(rows: int, shares: tuple[int, ...]) -> list[int]:
    """Returns the rows of each rank of ComfyUI's machine; rank 0 has at least one, since it reports for all."""
    sizes = list(chunk_sizes(rows, shares or len(machine_ranks())))
    if not sizes[0]:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    return sizes


def _compare(work: Conversion, x: Tensor, share: Share) -> None:
    """Raises Refused where a conversion divided over ranks differs from one on a single rank by more than rounding."""
    try:
        error = work.self_test(x, share)
    except Refused as refused:
        raise Refused("vae.undivided", reason=refused.sentence) from None
    allowed = error_limit(x.dtype)
    if not error <= allowed:
        raise Refused("vae.inexact", error=f"{error:.1e}", allowed=f"{allowed:.0e}")


@contextmanager
def report_progress(progress: Progress, ranks: MeshDim, model: nn.Module, job: VAEJob) -> Iterator[Callable[[], None]]:
    """Reports heartbeats and frames, and cancels all ranks together, while a VAE runs in this context. Yields a
    function to call before each divided function."""
    ticks, frames = count(1), 0
    total = (job.shape if job.method == "decode" else job.x.shape)[2] if job.x.ndim == 5 else 0
    layer = _frame_layer(model, job.method) if total > 1 else None

    def tick() -> None:
        progress.heartbeat()
        if next(ticks) % VOTE_EVERY == 0:
            progress.vote(ranks)

    def count_frames(_: nn.Module, args: Any, out: Any) -> None:
        nonlocal frames
        if (tensor := next((value for value in (out, *args) if isinstance(value, Tensor)), None)) is not None:
            frames += tensor.shape[2] if tensor.ndim == 5 else tensor.shape[0]
            progress.report_frames(min(frames, total), total)

    progress.vote(ranks)
    with layer.register_forward_hook(count_frames) if layer else nullcontext():
        yield tick


def _frame_layer(model: nn.Module, method: str) -> nn.Module | None:
    """Returns a layer that every frame passes once: the decoder's last convolution, or the encoder's first."""
    part = getattr(model, "decoder" if method == "decode" else "encoder", None)
    convs = [module for module in part.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)] if part else []
    return (convs[-1] if method == "decode" else convs[0]) if convs else None
