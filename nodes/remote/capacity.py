"""How much memory workers may take of the devices that they share with ComfyUI, and of main memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Sequence

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.group.limits import limit_by_worker, numbers_from
from ...parallel_runtime.group.worker_group import WorkerGroup
from ...parallel_runtime.planning.memory_model import Capacity
from ...parallel_runtime.planning.misfit import GIB
from ...parallel_runtime.specs import ModelSpec, Placement

LIMIT = "CP_MEMORY_GIB"  # GiB that a worker may take of its device; unset: all that is free, on the CPU no limit
MAX_GIB = 2.0**20
ALL_BYTES = 1e30  # ComfyUI's number for unloading everything


def capacity_for(placement: Placement, group: WorkerGroup | None, spec: ModelSpec) -> Capacity:
    """Returns the memory for a model: what each worker measured last as free, and what it already holds of this model,
    which can be reused; without a `group`, what is free on this machine. CP_MEMORY_GIB limits it."""
    readings = group.readings if group is not None else ()
    model = group.models.get(spec.unpatched) if group is not None else None
    offloaded = model.needed.fetched_bytes if model and model.weights.mode == "offload" else 0  # once a machine
    host = min(reading.host_free_bytes for reading in readings) + offloaded if readings else None
    if limits := user_limits(placement.world_size):
        return Capacity.of_each(limits, host_bytes=host, limited_by=LIMIT)
    if placement.devices[0] == "cpu":
        return Capacity(host_bytes=host)
    sharing = Counter(placement.devices)
    free = {device: free_bytes(torch.device(device)) for device in sharing}
    for device, reading in zip(group.placement.devices if group is not None else (), readings, strict=False):
        if device in free:
            free[device] += reading.graphs.bytes  # CUDA graphs are evicted where memory is missing
    local = [free[device] // sharing[device] for device in placement.devices]
    same = group is not None and group.placement == placement
    remote = [reading.free_bytes + reading.rank_bytes for reading in readings[len(local) :]] if same else []
    return Capacity.of_each([*local, *(remote or local * (placement.nnodes - 1))], host_bytes=host)


def user_limits(workers: int) -> tuple[int, ...]:
    """Returns the user's limit in bytes (CP_MEMORY_GIB) for each of `workers`; an empty tuple without a limit."""
    limits = limit_by_worker(numbers_from(LIMIT, "number of GiB"), workers)
    return tuple(int(min(number, MAX_GIB) * GIB) for number in limits)


def free_bytes(device: torch.device) -> int:
    """Returns a device's free bytes, with those of all models that ComfyUI would unload, the workers' included."""
    loaded = comfy.model_management.current_loaded_models
    unloadable = sum(model.model_loaded_memory() for model in loaded if model.device == device)
    return int(comfy.model_management.get_free_memory(device)) + unloadable


def unload_comfyui_models(devices: Collection[str], protected: Sequence[ModelPatcher]) -> None:
    """Has ComfyUI unload all models but `protected` from these devices, and frees the memory of dead models."""
    loaded = comfy.model_management.current_loaded_models
    keep = [model for model in loaded if any(model.model is patcher for patcher in protected)]
    for device in dict.fromkeys(devices):
        comfy.model_management.free_memory(ALL_BYTES, torch.device(device), keep)
    gc.collect()
    comfy.model_management.soft_empty_cache()
