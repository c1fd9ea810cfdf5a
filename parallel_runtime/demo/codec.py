"""Pictures to FLUX-shaped latents and back: a fixed linear map of 8x8 patches onto 16 channels.

The map is a principal component analysis of drawn pictures, kept in codec.safetensors. Latents are in ComfyUI's
LATENT space: after FLUX's own (latent - 0.1159) * 0.3611 they have about unit variance. Knows no model.
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


def encode(image: Tensor) -> Tensor:
    """[B, 3, H, W] in 0..1 to a LATENT [B, 16, H/8, W/8]; sides must be multiples of 8."""
    if image.shape[-2] % PATCH or image.shape[-1] % PATCH:
        raise ValueError(f"image sides must be multiples of {PATCH}, not {tuple(image.shape[-2:])}")
    codec = _codec()
    patches = torch.nn.functional.pixel_unshuffle(image, PATCH)
    mixed = torch.einsum("bphw,cp->bchw", patches - codec["mean"][:, None, None], codec["encode"])
    return mixed / SCALE + SHIFT


def decode(latent: Tensor) -> Tensor:
    """A LATENT [B, 16, h, w] to pictures [B, 8h, 8w, 3] in 0..1."""
    codec = _codec()
    mixed = (latent.float().cpu() - SHIFT) * SCALE
    patches = torch.einsum("bchw,cp->bphw", mixed, codec["decode"]) + codec["mean"][:, None, None]
    return torch.nn.functional.pixel_shuffle(patches, PATCH).permute(0, 2, 3, 1).clamp(0, 1)


def fit(images: list[Tensor]) -> dict[str, Tensor]:
    """The codec's tensors from pictures [3, H, W]: every channel gets variance 1 in model space."""
    rows = [torch.nn.functional.pixel_unshuffle(image[None], PATCH)[0].flatten(1).T for image in images]
    patches = torch.cat(rows).double()
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
    values, vectors = values[-CHANNELS:].flip(0), vectors[:, -CHANNELS:].flip(1)
    vectors = vectors * vectors.sum(0).sign()
    gain = values**-0.5
    return {
        "mean": mean.float(),
        "encode": (vectors * gain).T.float().contiguous(),
        "decode": (vectors / gain).T.float().contiguous(),
    }


def weights() -> Tensor:
    """What an error in each channel costs in the picture, softened, [16] with mean 1."""
    cost = _codec()["decode"].square().sum(1) ** 0.4
    return cost / cost.mean()


@cache
def _codec() -> dict[str, Tensor]:
    return load_file(FILE)
