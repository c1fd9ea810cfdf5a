"""What this rank holds on its device, and an out-of-memory error told so that a user knows what to change."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch

from .link import free_bytes
from .models import Model

GIB = 1 << 30


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception of its own for GPUs only; its CPU allocator raises a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def out_of_memory(device: torch.device, models: Iterable[Model]) -> str:
    """One sentence of what filled the memory, one of what to do."""
    held = [f"{model.name} ({model.weight_bytes / GIB:.2f} GiB of weights)" for model in models]
    most, free = (size / GIB for size in (_peak_bytes(device), free_bytes(device)))
    return (
        f"out of memory on {device}. It held {' and '.join(held) or 'no model yet'}, {most:.2f} GiB at most, and "
        f"{free:.2f} GiB are free. Make the latent or the batch smaller, use more "
        "workers or dtype bfloat16, or free the device of other models"
    )


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
