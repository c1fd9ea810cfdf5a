"""The workers' memory as ComfyUI sees it: a loaded model for each device, which ComfyUI's own book-keeping counts, and
how much the workers may take.

Before a run ComfyUI frees what the workers need on the devices that they share, and no more; under memory pressure,
on "Unload models" and on /free it unloads the workers' models like any other.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.errors import ParallelError
from ...parallel_runtime.group import machines, worker_group
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.planning import resolve, run_plan
from ...parallel_runtime.planning.memory_model import GIB, Capacity
from ...parallel_runtime.request import AfterSampling, ParallelRequest
from ...parallel_runtime.specs import ModelSpec, Placement, WeightPlacement

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
LIMIT = "CP_MEMORY_GIB"  # GiB that a worker may take of its device; unset: all that is free, on the CPU no limit
MAX_GIB = 2.0**20


class WeightlessPatcher(ModelPatcher):
    """A ModelPatcher whose weights are in other processes: this one has nothing to move and nothing to patch."""

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.model.device = device_to
        return 0

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        return 0

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        return self.model


class WorkerModel(torch.nn.Module):
    """An empty module: ComfyUI's log names its class where it would name a model."""


class WorkerModelPatcher(WeightlessPatcher):
    """A model's weights on one device of the workers. What ComfyUI needs of it is taken from the ranks on that device;
    others keep theirs, if they have all weights themselves."""

    group_model: GroupModel

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.size
        return self.size

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        """Evicts the model's CUDA graphs, then as many weights as are needed; returns their bytes on this device."""
        freed = self.group_model.evict_graphs().get(str(self.load_device), 0)
        return freed + self._give_back(memory_to_free - freed)

    def _give_back(self, nbytes: int) -> int:
        given = self.group_model.give_back(str(self.load_device), nbytes) if nbytes > 0 else 0
        self.model.model_loaded_weight_memory = max(0, self.model.model_loaded_weight_memory - given)
        return given

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        """Unloads the model where no other device has it. ComfyUI also detaches a model to load it again, and then
        without `unpatch_all`."""
        if unpatch_all and self.loaded_size():
            others = any(other.loaded_size() for other in self.group_model.patchers if other is not self)
            if not others or not self._give_back(self.size):
                self.group_model.free()
            self.model.model_loaded_weight_memory, self.model.device = 0, CPU
        return self.model


def sum_by_device(placement: Placement, bytes_by_rank: Sequence[int]) -> dict[str, int]:
    """Sums bytes of ranks over each device of this machine."""
    sums: dict[str, int] = {}
    for device, size in zip(placement.devices, bytes_by_rank, strict=False):
        sums[device] = sums.get(device, 0) + size
    return sums


# Whose patchers ComfyUI may list as loaded. It walks that list by index, and drops from it what Python collects: were a
# patcher collected meanwhile, ComfyUI's thread for prompts would end with an IndexError.
_counted: list[GroupModel] = []


@dataclass(eq=False)
class GroupModel:
    """A model or VAE of a worker group. `group.models` lists it from before it is loaded until it is unloaded."""

    group: worker_group.WorkerGroup
    spec: ModelSpec
    weights: WeightPlacement
    needed: run_plan.Estimate
    patchers: list[WorkerModelPatcher] = field(default_factory=list)
    unload_after_run: bool = False  # ComfyUI unloaded it in the middle of a run
    encoder: resolve.EncoderPlacement | None = None  # of a text encoder

    def __post_init__(self) -> None:
        for device, size in sum_by_device(self.group.placement, self.needed.weight_bytes_by_rank).items():
            self.patchers.append(WorkerModelPatcher(WorkerModel(), torch.device(device), CPU, size=size))
            self.patchers[-1].group_model = self
        _counted.append(self)

    def mark_unloaded(self) -> None:
        """Has ComfyUI count no device memory for this model."""
        for patcher in self.patchers:
            patcher.model.model_loaded_weight_memory = 0
            patcher.model.device = CPU

    def evict_graphs(self) -> dict[str, int]:
        """Has the workers drop this model's CUDA graphs, except from a callback of a run. Returns the freed bytes by
        device."""
        with runtime.exclusive(self.group) as group:
            if group is None or group.in_run or self.group.models.get(self.spec) is not self:
                return {}  # to a callback of a run the workers do not listen; ComfyUI then detaches the model
            graph_bytes = [readings.recorded_bytes(self.spec.fingerprint) for readings in group.readings]
            if not any(graph_bytes):
                return {}
            log.info("[CP] evicting the model's CUDA graphs from the workers: their memory is needed")
            with suppress(ParallelError):
                group.evict_graphs(self.spec)
            return sum_by_device(group.placement, graph_bytes)

    def give_back(self, device: str, nbytes: int) -> int:
        """Moves `nbytes` of its weights from one device, but in no callback of a run. Returns the freed bytes."""
        ranks = [rank for rank, name in enumerate(self.group.placement.devices) if name == device]
        with runtime.exclusive(self.group) as group:
            listed = group is not None and group.models.get(self.spec) is self
            if group is None or group.in_run or not listed:
                return 0
            before = self._resident_bytes(ranks)
            with suppress(ParallelError):
                group.give_back(self.spec, ranks, -(-nbytes // len(ranks)))
            freed = max(0, before - self._resident_bytes(ranks))
            log.info("[CP] the workers gave back %.1f GiB of %s: the next run loads them again", freed / GIB, device)
            return freed

    def _resident_bytes(self, ranks: Sequence[int]) -> int:
        readings = self.group.readings
        return sum(readings[rank].resident_bytes(self.spec.fingerprint) for rank in ranks if readings)

    def free(self, after: AfterSampling = "unload") -> bool:
        """Has the workers drop the conditions of a native sampler's run, and offload the weights to main memory or
        unload the model as `after` says; a group that cannot is ended. Returns whether the model was loaded: ComfyUI
        and the page may unload it on two threads at once. A callback of a run cannot reach the workers, so it only
        marks the model, which is unloaded at the end of that run.
        """
        with runtime.exclusive(self.group) as group:
            if group is not None and group.in_run:
                self.unload_after_run = self.unload_after_run or after == "unload"
                return True
            listed = self.group.models.get(self.spec) is self
            if after != "keep":
                self.mark_unloaded()
            if listed and after == "unload":
                del self.group.models[self.spec]
            if listed and group is not None:
                if after != "keep":
                    doing = "unloading the workers' model" if after == "unload" else "offloading the workers' model"
                    log.info("[CP] %s", doing)
                with suppress(ParallelError):
                    group.free(self.spec, after)
            return listed


def free_model(spec: ModelSpec, request: ParallelRequest | None) -> None:
    """Keeps, offloads or unloads a VAE or text encoder after a call of it, as the user chose."""
    group = runtime.live
    model = group.models.get(spec.unpatched) if group is not None else None
    if model is not None and request is not None and request.after_sampling != "keep":
        model.free(request.after_sampling)


def room_bytes(group: worker_group.WorkerGroup, spec: ModelSpec) -> list[int | None]:
    """Returns the bytes of its device that each worker of this machine may take for a model, with those that it has of
    it, beside all others that are loaded; None where nothing limits them."""
    placement = group.placement
    sharing = Counter(placement.devices)
    each = list(zip(placement.devices, group.readings, strict=False))
    if limits := user_limits(placement.world_size):
        free = [limit - reading.rank_bytes for limit, (_, reading) in zip(limits, each, strict=False)]
    elif placement.devices[0] == "cpu":
        return [None for _ in placement.devices]
    else:
        now = {device: _now_free_bytes(torch.device(device), group) for device in sharing}
        free = [now[device] // sharing[device] for device in placement.devices]
    held = [reading.resident_bytes(spec.fingerprint) for _, reading in each] or [0] * len(free)
    return [max(0, bytes_now + own) for bytes_now, own in zip(free, held, strict=True)]


def capacity_for(placement: Placement, group: worker_group.WorkerGroup | None, spec: ModelSpec) -> Capacity:
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
    free = dict.fromkeys(sharing, 0)
    for name in sharing:
        # Of all models that ComfyUI would unload, the workers' included, the bytes count as free.
        device = torch.device(name)
        loaded = [one for one in model_management.current_loaded_models if one.device == device]
        free[name] = _now_free_bytes(device, group) + sum(one.model_loaded_memory() for one in loaded)
    for name, reading in zip(group.placement.devices if group is not None else (), readings, strict=False):
        if name in free:
            free[name] += reading.graphs.bytes  # CUDA graphs are evicted where memory is missing
    local = [free[device] // sharing[device] for device in placement.devices]
    same = group is not None and group.placement == placement
    remote = [reading.free_bytes + reading.rank_bytes for reading in readings[len(local) :]] if same else []
    return Capacity.of_each([*local, *(remote or local * (placement.nnodes - 1))], host_bytes=host)


def user_limits(workers: int) -> tuple[int, ...]:
    """Returns the user's limit in bytes (CP_MEMORY_GIB) for each of `workers`; an empty tuple without a limit."""
    limits = machines.limits_by_worker(LIMIT, "number of GiB", workers)
    return tuple(int(min(number, MAX_GIB) * GIB) for number in limits)


def _now_free_bytes(device: torch.device, group: worker_group.WorkerGroup | None) -> int:
    """Returns what is free on a device: as its workers say, but on ComfyUI's own. To ask for another one opens a CUDA
    context there, which takes half a GiB as long as ComfyUI runs."""
    ranks = zip(group.placement.devices, group.readings, strict=False) if group is not None else ()
    said = [reading.free_bytes for name, reading in ranks if name == str(device)]
    if said and device != model_management.get_torch_device():
        return min(said)
    return int(model_management.get_free_memory(device))


def make_room(patcher: WorkerModelPatcher, workspace_bytes: int) -> None:
    """Lists a model of the workers as loaded, after ComfyUI has freed its device for it and `workspace_bytes`. Where
    only workers are on that device ComfyUI has nothing to free, and would open a CUDA context to find that out."""
    loaded, own = model_management.current_loaded_models, model_management.get_torch_device()
    gone = [one for one in _counted if not one.group.alive or one.group.models.get(one.spec) is not one]
    loaded[:] = [one for one in loaded if all(one.model not in model.patchers for model in gone)]
    _counted[:] = [model for model in _counted if model not in gone]
    on_device = [one for one in loaded if one.device == patcher.load_device]
    if patcher.load_device == own or not all(isinstance(one.model, WorkerModelPatcher) for one in on_device):
        model_management.load_models_gpu([patcher], memory_required=workspace_bytes)
        return
    listed = next((one for one in on_device if one.model is patcher), None)
    if listed is None:
        listed = model_management.LoadedModel(patcher)
        listed.model_load()
    else:
        loaded.remove(listed)
        patcher.partially_load(patcher.load_device)
    loaded.insert(0, listed)
