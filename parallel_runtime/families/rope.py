"""Rotary position embeddings computed as ComfyUI computes them: angles in float64. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotations(positions: Tensor, dims: Sequence[int], theta: float) -> Tensor:
    """Positions [N, len(dims)] to complex64 factors [N, sum(dims) / 2], `dims` channels an axis."""
    angles = []
    for axis, dim in enumerate(dims):
        exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim
        angles.append(positions[:, axis, None] / theta**exponents)
    turned = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(turned), turned).to(torch.complex64)
