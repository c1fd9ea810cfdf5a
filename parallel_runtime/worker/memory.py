"""What this rank holds on its device, and an out-of-memory error told so that a user knows what to change."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

import torch

from ..wire.readings import Graphs, Holding, Readings
from .engine.choosing import results
from .engine.memory import free_bytes, host_free_bytes, spare_bytes
from .engine.mesh import World
from .models import Model
from .weights.store import weight_bytes

GIB = 1 << 30
SHOWN = 4  # races: a message is no place for all there ever were


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception of its own for GPUs only; its CPU allocator raises a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def out_of_memory(device: torch.device, models: Iterable[Model]) -> str:
    """One sentence of what filled the memory, one of what to do."""
    sizes = ((model.name, weight_bytes(model.network) - model.away_bytes) for model in models)
    held = [f"{name} ({size / GIB:.2f} GiB of weights)" for name, size in sizes]
    most, free = (size / GIB for size in (_peak_bytes(device), free_bytes(device)))
    return (
        f"out of memory on {device}. It held {' and '.join(held) or 'no model yet'}, {most:.2f} GiB at most, and "
        f"{free:.2f} GiB are free. Make the latent or the batch smaller, use more "
        "workers or dtype bfloat16, or free the device of other models"
    )


def readings(device: torch.device, models: Iterable[Model], world: World) -> Readings:
    """What a user is shown of this rank, and the host plans by."""
    used, total = _used_and_total(device)
    present = list(models)
    graphs = _sum(model.recording.told for model in present)
    return Readings(
        used,
        total,
        tuple(_holding(model, device) for model in present),
        races=results(world)[-SHOWN:],
        graphs=graphs,
        free_bytes=free_bytes(device),
        spare_bytes=max(0, spare_bytes(device) - graphs.bytes),
        host_free_bytes=host_free_bytes(),
    )


def _sum(told: Iterable[Graphs]) -> Graphs:
    of = list(told)
    reasons = dict.fromkeys(reason for graphs in of for reason in graphs.eager)
    return Graphs(
        keys=sum(graphs.keys for graphs in of),
        replays=sum(graphs.replays for graphs in of),
        bytes=sum(graphs.bytes for graphs in of),
        eager=tuple(reasons),
    )


def _holding(model: Model, device: torch.device) -> Holding:
    tensors = [tensor for network in (model.network, *model.beside) for tensor in network.parameters()]
    resident = sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type) - model.away_bytes
    return Holding(model.spec.title, resident, sum(tensor.nbytes for tensor in tensors) - resident)


def _used_and_total(device: torch.device) -> tuple[int, int]:
    """Of a GPU what anybody uses; of main memory what this process does."""
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        return total - free, total
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * page, os.sysconf("SC_PHYS_PAGES") * page


def _peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
