"""The workers' memory as ComfyUI sees it: a loaded model a device, so that ComfyUI's own book-keeping counts it.

Before a run ComfyUI frees what the workers need on the devices that they share, and no more; under memory pressure,
on "Unload models" and on /free it unloads the workers' models like any other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ..parallel_runtime.errors import ParallelError
from ..parallel_runtime.host.group import WorkerGroup
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.host.storing import Prospect
from ..parallel_runtime.specs import AfterSampling, ModelSpec, Placement

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Hollow(ModelPatcher):
    """A MODEL whose weights are not in this process: there is nothing to move here, and nothing to patch."""

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.model.device = device_to
        return 0

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        return 0

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        return self.model


class WorkerModel(torch.nn.Module):
    """Named in ComfyUI's log where a model would be."""


class Resident(Hollow):
    """What the workers hold of one model on one device. Detaching it unloads that model, from all of their devices."""

    held: Held

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.size
        return self.size

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        """ComfyUI also detaches a model to load it again, and then says not `unpatch_all`."""
        if unpatch_all and self.loaded_size():
            self.held.give_back()
        return self.model


def on_devices(placement: Placement, each: Sequence[int]) -> dict[str, int]:
    """Of bytes that each rank has, or is to have, those on each device of this machine."""
    sums: dict[str, int] = {}
    for device, size in zip(placement.devices, each, strict=False):
        sums[device] = sums.get(device, 0) + size
    return sums


@dataclass(eq=False)
class Held:
    """One model or VAE in the workers of a group, which lists it as long as it has its place there."""

    group: WorkerGroup
    spec: ModelSpec
    way: Prospect
    residents: list[Resident] = field(default_factory=list)

    @classmethod
    def by(cls, group: WorkerGroup, spec: ModelSpec, way: Prospect) -> Held:
        """What every worker of `group` will have; nothing is loaded yet."""
        held = cls(group, spec, way)
        for device, size in on_devices(group.placement, way.held).items():
            held.residents.append(Resident(WorkerModel(), torch.device(device), CPU, size=size))
            held.residents[-1].held = held
        return held

    def forget(self) -> None:
        """It takes nothing of any device."""
        for resident in self.residents:
            resident.model.model_loaded_weight_memory = 0
            resident.model.device = CPU

    def settle(self, after: AfterSampling) -> None:
        """Do after a run what the user wants done with its model."""
        if after != "keep":
            self.give_back(offload=after == "offload")

    def give_back(self, *, offload: bool = False) -> bool:
        """Have the workers drop it, or `offload` its weights to main memory; a group that cannot is ended. Says whether
        it was there: ComfyUI may want it on one thread while the page does on another, and the second finds nothing.
        """
        with runtime.undisturbed(self.group) as group:
            there = self.group.held.get(self.spec) is self
            self.forget()
            if there and not offload:
                del self.group.held[self.spec]
            if there and group is not None:
                log.info("[CP] %s the workers' model", "offloading" if offload else "unloading")
                with contextlib.suppress(ParallelError):
                    group.unload(self.spec, offload=offload)
            return there
