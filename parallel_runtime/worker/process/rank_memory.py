"""The memory readings of this rank, and the message of an out-of-memory error."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import torch

from ...architectures.network_modules import weight_bytes
from ...engine.comm.devices import cached_bytes, free_bytes, host_free_bytes
from ...errors import Sentence, say
from ...wire.readings import Graphs, ModelMemory, Readings
from ..models import Model

GIB = 1 << 30


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether `error` means out of memory; PyTorch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def out_of_memory(device: torch.device, models: Sequence[Model]) -> Sentence:
    """Returns a sentence that says what filled the memory, and one that says what to do."""
    sizes = [(model.name, weight_bytes(model.network) - model.nonresident_bytes) for model in models]
    most, free = (size / GIB for size in (_peak_bytes(device), free_bytes(device)))
    return say(
        "died.memory",
        device=str(device),
        models=[say("died.memory.model", model=name, size=f"{size / GIB:.2f}") for name, size in sizes]
        or say("died.memory.none"),
        most=f"{most:.2f}",
        free=f"{free:.2f}",
    )


def readings(device: torch.device, models: Sequence[Model]) -> Readings:
    """Returns the memory readings of this rank, which the page shows and the host plans by."""
    used, total = _used_and_total(device)
    graphs = _sum([model.graph_runner.stats for model in models])
    return Readings(
        used,
        total,
        tuple(_model_memory(model, device) for model in models),
        graphs=graphs,
        free_bytes=free_bytes(device),
        allocator_free_bytes=max(0, cached_bytes(device) - graphs.bytes),
        host_free_bytes=host_free_bytes(),
    )


def _sum(stats: list[Graphs]) -> Graphs:
    reasons = dict.fromkeys(reason for graphs in stats for reason in graphs.eager)
    return Graphs(
        keys=sum(graphs.keys for graphs in stats),
        replays=sum(graphs.replays for graphs in stats),
        bytes=sum(graphs.bytes for graphs in stats),
        eager=tuple(reasons),
    )


def _model_memory(model: Model, device: torch.device) -> ModelMemory:
    tensors = [*model.network.parameters(), *model.additional_weights]
    resident = sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type) - model.nonresident_bytes
    offloaded = sum(tensor.nbytes for tensor in tensors) - resident
    return ModelMemory(model.spec.title, resident, offloaded, model.spec.fingerprint, model.graph_runner.stats.bytes)


def _used_and_total(device: torch.device) -> tuple[int, int]:
    """Returns (used, total) bytes: used by all processes on a GPU, by this one in main memory."""
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
