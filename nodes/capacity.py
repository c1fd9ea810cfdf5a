"""How much memory workers may take: of the devices that they share with ComfyUI, and of main memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Sequence

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ..parallel_runtime.host.group import WorkerGroup
from ..parallel_runtime.host.limits import numbers_from, of_each
from ..parallel_runtime.host.storing import GIB, Capacity
from ..parallel_runtime.specs import ModelSpec, Placement

LIMIT = "CP_MEMORY_GIB"  # of its device that a worker may take; without it what is free, and on the CPU anything
MOST = 2.0**20  # GiB: more than any device has
ALL = 1e30  # bytes: ComfyUI's own word for everything


def capacity_for(placement: Placement, group: WorkerGroup | None, spec: ModelSpec) -> Capacity:
    """What each worker found when it was asked last, what it has of this model included; where there is no `group` yet,
    what is free here."""
    readings = group.readings if group is not None else ()
    held = group.held.get(spec.unpatched) if group is not None else None
    own = held.way.fetched_bytes if held and held.way.storage.mode == "offload" else 0  # once a machine
    host = min(told.host_free_bytes for told in readings) + own if readings else None
    if limits := limits_of(placement.world_size):
        return Capacity.of_each(limits, host_bytes=host, limited_by=LIMIT)
    if placement.devices[0] == "cpu":
        return Capacity(host_bytes=host)
    sharing = Counter(placement.devices)
    free = {device: free_bytes(torch.device(device)) for device in sharing}
    here = [free[device] // sharing[device] for device in placement.devices]
    others = [told.free_bytes + told.own_bytes for told in readings[len(here) :]]
    return Capacity.of_each([*here, *(others or here * (placement.nnodes - 1))], host_bytes=host)


def limits_of(workers: int) -> tuple[int, ...]:
    """What the user lets each of so many workers have of its device, in bytes; none where that is anything."""
    return tuple(int(min(number, MOST) * GIB) for number in of_each(numbers_from(LIMIT, "number of GiB"), workers))


def free_bytes(device: torch.device) -> int:
    """What is free, and what ComfyUI would free: its own models, and what the workers hold."""
    loaded = comfy.model_management.current_loaded_models
    held = sum(model.model_loaded_memory() for model in loaded if model.device == device)
    return int(comfy.model_management.get_free_memory(device)) + held


def let_go(devices: Collection[str], kept: Sequence[ModelPatcher]) -> None:
    """Have ComfyUI give back all that it can of these devices, but for the models `kept`. What it lists is unloaded;
    of what it no longer lists memory may be left until it is collected."""
    loaded = comfy.model_management.current_loaded_models
    keep = [model for model in loaded if any(model.model is one for one in kept)]
    for device in dict.fromkeys(devices):
        comfy.model_management.free_memory(ALL, torch.device(device), keep)
    gc.collect()
    comfy.model_management.soft_empty_cache()
