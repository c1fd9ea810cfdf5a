"""Tensors as they travel in float8: half of the bytes of bfloat16, and not exact.

Each head of a token has a scale of its own, which lies behind its numbers: whatever cuts, sends or joins tokens and
heads takes it along. Two ranks that are sent the same bytes compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import allocate

SCALE_BYTES = 2  # of a bfloat16
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max


def to_float8(tensor: Tensor) -> Tensor:
    """Returns [..., head_dim] as bytes [..., head_dim + SCALE_BYTES]."""
    largest = torch.linalg.vector_norm(tensor, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scale = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    dim = tensor.shape[-1]
    packed = allocate((*tensor.shape[:-1], dim + SCALE_BYTES), scale.view(torch.uint8))
    packed[..., :dim].view(_FLOAT8).copy_(tensor / scale)
    packed[..., dim:].copy_(scale.view(torch.uint8))
    return packed


def from_float8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Undoes `to_float8`, but for rounding."""
    dim = packed.shape[-1] - SCALE_BYTES
    scale = packed[..., dim:].contiguous().view(torch.bfloat16)
    return packed[..., :dim].view(_FLOAT8).to(dtype) * scale.to(dtype)
