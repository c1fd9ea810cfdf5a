"""The workers' memory as ComfyUI sees it: one loaded model a device, so that ComfyUI's own book-keeping counts it.

Before a run ComfyUI frees what the workers need on the devices that they share, and no more; under memory pressure,
on "Unload models" and on /free it unloads the workers like any other model.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ..parallel_runtime.host.group import WorkerGroup
from ..parallel_runtime.host.runtime import unload_group
from ..parallel_runtime.specs import ModelSpec

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class WorkerModel(torch.nn.Module):
    """Named in ComfyUI's log where a model would be."""


class Resident(ModelPatcher):
    """What the workers hold on one device. It has no weights of its own to move: detaching it unloads the workers."""

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.size
        return self.size

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        """Workers give back everything or nothing."""
        return 0

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        """Unload the workers. ComfyUI also detaches a model to load it again, and then says not `unpatch_all`."""
        if unpatch_all and self.model.model_loaded_weight_memory:
            self.model.model_loaded_weight_memory = 0
            self.model.device = self.offload_device
            log.info("[CP] unloading the workers' model")
            unload_group()
        return self.model


class Residence:
    """The residents of the model that the workers were last asked for."""

    def __init__(self) -> None:
        self._key: tuple[WorkerGroup, ModelSpec] | None = None
        self._residents: list[Resident] = []

    def claim(self, group: WorkerGroup, spec: ModelSpec, weight_bytes: int, activation_bytes: int) -> None:
        """Have ComfyUI make room on every device of `group` for its workers' weights and activations."""
        key = (group, replace(spec, patches=""))
        if self._key != key:
            unload_group()  # what is there now would count as taken
            self._key = key
            workers = Counter(torch.device(name) for name in group.placement.devices)
            self._residents = [
                Resident(WorkerModel(), device, CPU, size=weight_bytes * count) for device, count in workers.items()
            ]
        comfy.model_management.load_models_gpu(self._residents, memory_required=activation_bytes)


residence = Residence()
