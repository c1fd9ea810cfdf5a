"""FLUX-shaped latents to pictures: a fixed linear map of 16 channels onto patches of 8x8.

The map is a principal component analysis of drawn pictures, kept in codec.safetensors; tests/demo_training/fitting.py
made it. Latents are in ComfyUI's LATENT space: after FLUX's own (latent - 0.1159) * 0.3611 they have about unit
variance. Knows no model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FILE = Path(__file__).parent / "codec.safetensors"
PATCH, CHANNELS = 8, 16
SCALE, SHIFT = 0.3611, 0.1159


def decode(latent: Tensor) -> Tensor:
    """Returns the pictures [B, 8h, 8w, 3], in 0..1, of a LATENT [B, 16, h, w]."""
    codec = tensors()
    mixed = (latent.float().cpu() - SHIFT) * SCALE
    patches = torch.einsum("bchw,cp->bphw", mixed, codec["decode"]) + codec["mean"][:, None, None]
    return torch.nn.functional.pixel_shuffle(patches, PATCH).permute(0, 2, 3, 1).clamp(0, 1)


@cache
def tensors() -> dict[str, Tensor]:
    """Returns the `mean` of a patch, and `encode` and `decode` [channels, patch], which are nearly inverse."""
    return load_file(FILE)
