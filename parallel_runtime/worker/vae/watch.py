"""What ranks say and hear while a VAE runs: that they live, how far they are, and whether all of them stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn

from ...jobs import VAEJob
from ..engine.exchange import any_of
from ..engine.mesh import Axis
from ..pulse import Pulse

VOTE_EVERY = 32  # functions that are divided; a cancel waits for so many


@contextmanager
def watching(pulse: Pulse, ranks: Axis, model: nn.Module, job: VAEJob) -> Iterator[Callable[[], None]]:
    """While it runs: says that this rank lives, lets all ranks stop together, and counts the frames that are done.
    Yields what to call before each function that is divided."""
    agree, ticks, frames = partial(any_of, ranks), count(1), 0
    total = (job.shape if job.method == "decode" else job.x.shape)[2] if job.x.ndim == 5 else 0
    gate = _gate(model, job.method) if total > 1 else None

    def tick() -> None:
        pulse.beat()
        if next(ticks) % VOTE_EVERY == 0:
            pulse.vote(agree)

    def passed(_: nn.Module, args: Any, made: Any) -> None:
        nonlocal frames
        if (seen := next((value for value in (made, *args) if isinstance(value, Tensor)), None)) is not None:
            frames += seen.shape[2] if seen.ndim == 5 else seen.shape[0]
            pulse.converted(min(frames, total), total)

    pulse.vote(agree)
    with gate.register_forward_hook(passed) if gate else nullcontext():
        yield tick


def _gate(model: nn.Module, method: str) -> nn.Module | None:
    """Every frame passes it once: the decoder's last convolution, the encoder's first."""
    part = getattr(model, "decoder" if method == "decode" else "encoder", None)
    found = [module for module in part.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)] if part else []
    return (found[-1] if method == "decode" else found[0]) if found else None
