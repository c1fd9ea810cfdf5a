"""What ranks say and hear while a VAE runs: that they live, how far they are, and whether all of them stop."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...jobs import VAEJob
from ..engine.exchange import any_of
from ..engine.mesh import Axis
from ..pulse import Pulse

VOTE_EVERY = 32  # functions that are divided; a cancel waits for so many


class Watch:
    """While it runs: says that this rank lives, lets all ranks stop together, and counts the frames that are done."""

    def __init__(self, pulse: Pulse, ranks: Axis, model: nn.Module, job: VAEJob) -> None:
        self._pulse = pulse
        self._ranks = ranks
        self._ticks = 0
        self._frames = 0
        self._total = (job.shape if job.method == "decode" else job.x.shape)[2] if job.x.ndim == 5 else 0
        self._gate = _gate(model, job.method) if self._total > 1 else None

    def tick(self) -> None:
        self._ticks += 1
        self._pulse.beat()
        if self._ticks % VOTE_EVERY == 0:
            self._pulse.vote(self._agree)

    def __enter__(self) -> None:
        self._pulse.vote(self._agree)
        if self._gate is not None:
            self._hook = self._gate.register_forward_hook(self._passed)

    def __exit__(self, *exc: object) -> None:
        if self._gate is not None:
            self._hook.remove()

    def _passed(self, gate: nn.Module, args: Any, made: Any) -> None:
        frames = next((value for value in (made, *args) if isinstance(value, Tensor)), None)
        if frames is None:
            return
        self._frames += frames.shape[2] if frames.ndim == 5 else frames.shape[0]
        self._pulse.converted(min(self._frames, self._total), self._total)

    def _agree(self, flag: bool) -> bool:
        return any_of(self._ranks, flag)


def _gate(model: nn.Module, method: str) -> nn.Module | None:
    """Every frame passes it once: the decoder's last convolution, the encoder's first."""
    part = getattr(model, "decoder" if method == "decode" else "encoder", None)
    found = [module for module in part.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)] if part else []
    return (found[-1] if method == "decode" else found[0]) if found else None
