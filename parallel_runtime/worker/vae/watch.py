"""Progress of a VAE on all ranks while it runs: heartbeats, the frames that are done, and the vote to cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

from torch import Tensor, nn

from ...engine.comm.mesh import MeshDim
from ...jobs import VAEJob
from ..process.progress import Progress

VOTE_EVERY = 32  # divided functions between two votes; a cancel waits for as many


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
