"""The workers' memory as ComfyUI sees it: a loaded model for each device, which ComfyUI's own book-keeping counts.

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

from ...parallel_runtime.errors import ParallelError
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.group.worker_group import WorkerGroup
from ...parallel_runtime.planning.run_plan import Estimate
from ...parallel_runtime.request import AfterSampling
from ...parallel_runtime.specs import ModelSpec, Placement, WeightPlacement
from ..describe.remote_model import CPU, WeightlessPatcher

log = logging.getLogger(__name__)


class WorkerModel(torch.nn.Module):
    """An empty module: ComfyUI's log names its class where it would name a model."""


class WorkerModelPatcher(WeightlessPatcher):
    """A model's weights on one device of the workers. Detaching it unloads that model from all of their devices."""

    group_model: GroupModel

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.size
        return self.size

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        """Evicts the model's CUDA graphs, which ComfyUI asks for before it unloads a model; returns their bytes on this
        device."""
        return self.group_model.evict_graphs().get(str(self.load_device), 0)

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        """ComfyUI also detaches a model to load it again, and then without `unpatch_all`."""
        if unpatch_all and self.loaded_size():
            self.group_model.unload()
        return self.model


def sum_by_device(placement: Placement, bytes_by_rank: Sequence[int]) -> dict[str, int]:
    """Sums bytes of ranks over each device of this machine."""
    sums: dict[str, int] = {}
    for device, size in zip(placement.devices, bytes_by_rank, strict=False):
        sums[device] = sums.get(device, 0) + size
    return sums


@dataclass(eq=False)
class GroupModel:
    """A model or VAE of a worker group. `group.models` lists it from before it is loaded until it is unloaded."""

    group: WorkerGroup
    spec: ModelSpec
    weights: WeightPlacement
    needed: Estimate
    patchers: list[WorkerModelPatcher] = field(default_factory=list)
    unload_after_run: bool = False  # ComfyUI unloaded it in the middle of a run

    def __post_init__(self) -> None:
        for device, size in sum_by_device(self.group.placement, self.needed.weight_bytes_by_rank).items():
            self.patchers.append(WorkerModelPatcher(WorkerModel(), torch.device(device), CPU, size=size))
            self.patchers[-1].group_model = self

    def mark_unloaded(self) -> None:
        """Has ComfyUI count no device memory for this model."""
        for patcher in self.patchers:
            patcher.model.model_loaded_weight_memory = 0
            patcher.model.device = CPU

    def end_run(self, after_sampling: AfterSampling) -> None:
        if after_sampling != "keep":
            self.unload(offload=after_sampling == "offload")

    def evict_conditions(self) -> None:
        """Has the workers drop the conditions of a native sampler's run, which is over."""
        with runtime.exclusive(self.group) as group:
            if group is not None and group.models.get(self.spec) is self:
                with contextlib.suppress(ParallelError):
                    group.free(self.spec, "keep")

    def evict_graphs(self) -> dict[str, int]:
        """Has the workers drop this model's CUDA graphs. Returns the freed bytes by device."""
        with runtime.exclusive(self.group) as group:
            if group is None or self.group.models.get(self.spec) is not self:
                return {}
            graph_bytes = [readings.recorded_bytes(self.spec.fingerprint) for readings in group.readings]
            if not any(graph_bytes):
                return {}
            log.info("[CP] evicting the model's CUDA graphs from the workers: their memory is needed")
            with contextlib.suppress(ParallelError):
                group.evict_graphs(self.spec)
            return sum_by_device(group.placement, graph_bytes)

    def unload(self, *, offload: bool = False) -> bool:
        """Has the workers unload the model, or `offload` its weights to main memory; a group that cannot is ended.
        Returns whether it was loaded: ComfyUI and the page may unload it on two threads at once. A callback of a run
        cannot reach the workers, so it only marks the model, which is unloaded at the end of that run.
        """
        with runtime.exclusive(self.group) as group:
            if group is not None and group.in_run:
                self.unload_after_run = self.unload_after_run or not offload
                return True
            listed = self.group.models.get(self.spec) is self
            self.mark_unloaded()
            if listed and not offload:
                del self.group.models[self.spec]
            if listed and group is not None:
                log.info("[CP] %s the workers' model", "offloading" if offload else "unloading")
                with contextlib.suppress(ParallelError):
                    group.free(self.spec, "offload" if offload else "unload")
            return listed
