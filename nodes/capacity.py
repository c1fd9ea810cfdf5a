"""How much memory workers may take: of the devices that they share with ComfyUI, and of main memory."""

from __future__ import annotations

from collections import Counter

import comfy.model_management
import torch

from ..parallel_runtime.host.cost import Link
from ..parallel_runtime.host.limits import number_from
from ..parallel_runtime.host.storing import GIB, Capacity
from ..parallel_runtime.specs import Placement

LIMIT = "CP_MEMORY_GIB"  # of its device that a worker may take; without it what is free, and on the CPU anything
MOST = 2.0**20  # GiB: more than any device has


def capacity_for(placement: Placement, link: Link | None, taken: int = 0) -> Capacity:
    """The least that any worker of the group finds; `taken` of main memory are the workers' already."""
    host = min(link.host_free_bytes) - taken if link and link.host_free_bytes else None
    if limit := number_from(LIMIT, 0.0, "number of GiB"):
        return Capacity(device_bytes=int(min(limit, MOST) * GIB), host_bytes=host, limited_by=LIMIT)
    if placement.devices[0] == "cpu":
        return Capacity(host_bytes=host)
    here = [free_bytes(torch.device(device)) // sharing for device, sharing in Counter(placement.devices).items()]
    others = link.free_bytes[len(placement.devices) :] if link else ()
    return Capacity(device_bytes=min([*here, *others]), host_bytes=host)


def free_bytes(device: torch.device) -> int:
    """What is free, and what ComfyUI would free: its own models, and what the workers hold."""
    loaded = comfy.model_management.current_loaded_models
    held = sum(model.model_loaded_memory() for model in loaded if model.device == device)
    return int(comfy.model_management.get_free_memory(device)) + held
