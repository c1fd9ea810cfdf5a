"""The other direction of the demo's codec, pictures to latents, and how the two were found. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_runtime.demo.words_and_pictures import CHANNELS, PATCH, SCALE, SHIFT, tensors


def encode(image: Tensor) -> Tensor:
    """[B, 3, H, W] in 0..1 to a LATENT [B, 16, H/8, W/8]; sides must be multiples of 8."""
    if image.shape[-2] % PATCH or image.shape[-1] % PATCH:
        raise ValueError(f"image sides must be multiples of {PATCH}, not {tuple(image.shape[-2:])}")
    codec = tensors()
    patches = torch.nn.functional.pixel_unshuffle(image, PATCH)
    mixed = torch.einsum("bphw,cp->bchw", patches - codec["mean"][:, None, None], codec["encode"])
    return mixed / SCALE + SHIFT


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
    cost = tensors()["decode"].square().sum(1) ** 0.4
    return cost / cost.mean()
