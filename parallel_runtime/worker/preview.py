"""The latents of a step on their way to the host, without making the device wait: they leave when they have arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Send = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class _Coming:
    latents: dict[str, Tensor]
    send: Send
    arrived: Callable[[], bool]


class Previews:
    """At most one is on its way: a step that comes meanwhile is dropped."""

    def __init__(self) -> None:
        self._coming: _Coming | None = None

    def offer(self, latents: dict[str, Tensor], send: Send) -> None:
        """`send` is called with them in main memory: at once on the CPU, else by a later `offer` or `flush`."""
        self.flush()
        if self._coming is None:
            self._coming = _Coming(*_copied(latents, send))
            self.flush()

    def flush(self) -> None:
        """Send what has arrived."""
        if self._coming is not None and self._coming.arrived():
            coming, self._coming = self._coming, None
            coming.send(coming.latents)


def _copied(latents: dict[str, Tensor], send: Send) -> tuple[dict[str, Tensor], Send, Callable[[], bool]]:
    device = next(iter(latents.values())).device
    if device.type == "cpu":
        return latents, send, lambda: True
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in latents.items()
    }
    event = torch.Event(device=device)
    event.record()
    return copies, send, event.query
