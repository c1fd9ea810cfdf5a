"""A VAE's layers as an outer rank calls them, one neighbour at hand, with next to nothing to compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.rows.conversion import HANDLERS
from parallel_runtime.engine.rows.functions import RowFunctions, Share

ROWS, CHANNELS = 8, 32
Call = Callable[[], Tensor]


def vae_layers(world: int) -> dict[str, Call]:
    """Each plain, and on this rank's rows."""
    x = torch.randn(1, CHANNELS, ROWS, 8)
    video = x[:, :, None].repeat(1, 1, 3, 1, 1)
    square, cube = torch.randn(CHANNELS, CHANNELS, 3, 3), torch.randn(CHANNELS, CHANNELS, 3, 3, 3)
    layers: dict[str, Call] = {
        "convolution": lambda: F.conv2d(x, square, padding=1),
        "3D convolution": lambda: F.conv3d(video, cube, padding=(0, 1, 1)),
        "padding": lambda: F.pad(x, (1, 1, 1, 1), mode="replicate"),
        "group norm": lambda: F.group_norm(x, 8),
        "nonlinearity": lambda: F.silu(x),
    }
    share = Share(ranks=MeshDim(size=world, ranks=tuple(range(world))), dim=-2, units=(ROWS,) * world)
    mode = RowFunctions(share, HANDLERS)

    def divided(layer: Call) -> Call:
        def call() -> Tensor:
            with mode:
                return layer()

        return call

    plain = {f"plain {name}": layer for name, layer in layers.items()}
    return plain | {f"ours {name}": divided(layer) for name, layer in layers.items()}
