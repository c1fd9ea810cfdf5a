"""What tells one VAE from all others, wherever its weights lie: the same text in ComfyUI's process and in a worker."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

SAMPLES = 64
PLAIN = (bool, int, float, str, tuple, list, dict, type, type(None))


def witness(model: nn.Module, dtype: torch.dtype) -> str:
    """Of how it is built, and of samples of every weight, rounded to `dtype`."""
    digest = hashlib.sha256(str(model).encode())
    digest.update(
        repr(sorted((name, repr(value)) for name, value in vars(model).items() if _says(name, value))).encode()
    )
    pieces: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            pieces.setdefault(tensor.device, []).append(_sample(tensor).to(dtype))
    for samples in pieces.values():
        digest.update(torch.cat(samples).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _says(name: str, value: Any) -> bool:
    return not name.startswith("_") and name != "training" and isinstance(value, PLAIN)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
