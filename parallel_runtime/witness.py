"""What tells one VAE from all others, wherever its weights lie: the same text in ComfyUI's process and in a worker."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

SAMPLES = 64
BUILT_BY = (  # what does not show in its modules
    "config",
    "latent_format",
    "timestep_conditioning",
    "decode_noise_scale",
    "decode_timestep",
)


def witness(model: nn.Module, dtype: torch.dtype) -> str:
    """Of how it is built, and of samples of every weight, rounded to `dtype`. Weights may be on several devices."""
    digest = hashlib.sha256(str(model).encode())
    digest.update(repr([getattr(model, name, None) for name in BUILT_BY]).encode())
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            digest.update(_sample(tensor).to(dtype).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """In main memory, one after another."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu().contiguous()
