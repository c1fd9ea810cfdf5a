"""The workers' memory as ComfyUI sees it: a loaded model a device, so that ComfyUI's own book-keeping counts it.

Before a run ComfyUI frees what the workers need on the devices that they share, and no more; under memory pressure,
on "Unload models" and on /free it unloads the workers' models like any other.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_management
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.model_patcher import ModelPatcher

from ..parallel_runtime.errors import ParallelError, Refused
from ..parallel_runtime.host.cost import Link, Work
from ..parallel_runtime.host.group import WorkerGroup
from ..parallel_runtime.host.headroom import Shortage, shortage
from ..parallel_runtime.host.runtime import undisturbed
from ..parallel_runtime.host.storing import Case, Prospect, decide, why_whole
from ..parallel_runtime.specs import AfterSampling, Division, ModelSpec, VAESpec, WeightsChoice
from .capacity import LIMIT, capacity_for, let_go, limit_bytes

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
KEEP = 2  # models that workers hold at once, where there is room: as many as Wan 2.2 samples one video with


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


@dataclass(eq=False)
class Held:
    """One model in the workers of a group."""

    group: WorkerGroup
    spec: ModelSpec
    way: Prospect
    residents: list[Resident] = field(default_factory=list)
    present: bool = False

    @classmethod
    def by(cls, group: WorkerGroup, spec: ModelSpec, way: Prospect) -> Held:
        """The model that every worker of `group` will have; nothing is loaded yet."""
        held = cls(group, spec.unpatched, way)
        for device, workers in Counter(map(torch.device, group.placement.devices)).items():
            held.residents.append(Resident(WorkerModel(), device, CPU, size=way.held_bytes * workers))
            held.residents[-1].held = held
        return held

    def forget(self) -> None:
        """It takes nothing of any device."""
        for resident in self.residents:
            resident.model.model_loaded_weight_memory = 0
            resident.model.device = CPU

    def give_back(self, *, offload: bool = False) -> None:
        """Have the workers drop it, or `offload` its weights to main memory; a group that cannot is ended.

        ComfyUI may want it on one thread while the page does on another: the second finds nothing left.
        """
        with undisturbed(self.group) as group:
            there = self.present or any(resident.loaded_size() for resident in self.residents)
            self.forget()
            self.present = offload
            if group is not None and there:
                log.info("[CP] %s the workers' model", "offloading" if offload else "unloading")
                with contextlib.suppress(ParallelError):
                    group.unload(self.spec, offload=offload)


class Residence:
    """The models in the workers of the group that was last asked, the last used one last."""

    def __init__(self) -> None:
        self._group: WorkerGroup | None = None
        self._held: dict[ModelSpec, Held] = {}

    def decide(self, group: WorkerGroup, spec: ModelSpec, choice: WeightsChoice, case: Case) -> Prospect:
        """Where the weights of a model shall be. Raises Refused where they fit nowhere."""
        held = self._held.get(spec.unpatched) if group is self._group else None
        way = decide(choice, case, before=held.way.storage if held and held.present else None)
        if why := why_whole(choice, way, case):
            log.info("[CP] %s", why)
        if way.rows:
            log.info("[CP] prompts are evaluated one by one: there is no memory for %d together", case.prompts)
        return way

    def case(self, spec: ModelSpec, work: Work, division: Division, link: Link | None) -> Case:
        """What these workers have for it at this moment."""
        placement = division.placement
        here = self._group is not None and self._group.alive and self._group.placement == placement
        capacity = capacity_for(placement, self._main_memory(spec) if here else 0)
        return Case(work=work, degrees=division.degrees, capacity=capacity, link=link)

    def claim(self, group: WorkerGroup, spec: ModelSpec, way: Prospect, more_bytes: int) -> None:
        """Have ComfyUI make room on every device of `group` for its workers' weights, and for so much beside them."""
        if group is not self._group:
            self._group, self._held = group, {}
        held = self._held.pop(spec.unpatched, None)
        if held is None or held.way.held_bytes != way.held_bytes:
            if held is not None:
                held.forget()
            held = Held.by(group, spec, way)
        held.way, held.present = way, True
        self._held = {key: other for key, other in self._held.items() if other.present}
        for oldest in list(self._held)[: -(KEEP - 1)]:
            self._held.pop(oldest).give_back()
        self._held[spec.unpatched] = held
        comfy.model_management.soft_empty_cache()  # it counts as free, but workers cannot have it
        comfy.model_management.load_models_gpu(held.residents, memory_required=more_bytes)

    def lodge(
        self, group: WorkerGroup, spec: ModelSpec, division: Division, work: Work, choice: WeightsChoice
    ) -> Prospect:
        """Find a model's weights a place, and make room for them and for this work on every device. Raises Refused,
        with the numbers, before any worker has taken memory."""
        case = self.case(spec, work, division, group.link)
        way = self.decide(group, spec, choice, case)
        lack = self._claimed(group, spec, case, way, choice)
        try:
            if lack is not None and choice == "auto":  # ComfyUI had counted on what it could not let go of
                case = replace(case, capacity=replace(case.capacity, device_bytes=lack.each))
                way = self.decide(group, spec, choice, case)
                lack = self._claimed(group, spec, case, way, choice)
            if lack is not None:
                raise Refused(
                    f"{work.figures.name} does not fit: {lack}, also after ComfyUI has let go of what it could. End "
                    "what else uses that device, set weights to auto, shard or offload, take more workers, or make "
                    "the picture or video smaller"
                )
        except Refused:
            self._held.pop(spec.unpatched).give_back()
            raise
        return way

    def make_room(self, group: WorkerGroup, spec: ModelSpec | VAESpec, needed: int, limit: int = 0) -> Shortage | None:
        """What is still missing of the `needed` bytes that each worker takes for a claimed model, after ComfyUI was
        asked to let go of others where it must. `limit` is what one may have of its device, 0 for what is free."""
        placement = group.placement
        if placement.devices[0] == "cpu" and not limit:
            return None

        def missing() -> Shortage | None:
            readings = group.measure(throw_exception_if_processing_interrupted)
            return shortage(placement, readings, spec.title, needed, limit=limit or None, limited_by=LIMIT)

        if lack := missing():
            log.info("[CP] %s: ComfyUI lets go of what it can", lack)
            let_go(placement.devices, self._held[spec.unpatched].residents)
            lack = missing()
        return lack

    def _claimed(
        self, group: WorkerGroup, spec: ModelSpec, case: Case, way: Prospect, choice: WeightsChoice
    ) -> Shortage | None:
        """What is missing all the same."""
        beside = case.beside_bytes(way)
        self.claim(group, spec, way, beside)
        return self.make_room(group, spec, way.held_bytes + beside, limit_bytes() if choice == "auto" else 0)

    def _main_memory(self, spec: ModelSpec) -> int:
        """What this model has of it: once a machine, whatever its workers are."""
        held = self._held.get(spec.unpatched)
        return held.way.fetched_bytes if held and held.present and held.way.storage.mode == "offload" else 0

    def give_back_all(self) -> list[str]:
        """Have the workers drop every model; their files' names."""
        held, self._held = list(self._held.values()), {}
        given = [model for model in held if model.present]
        for model in given:
            model.give_back()
        return [model.spec.title for model in given]

    def settle(self, spec: ModelSpec, policy: AfterSampling) -> None:
        """Do after a run what the user wants done with its model."""
        if policy != "keep" and (held := self._held.get(spec.unpatched)):
            held.give_back(offload=policy == "offload")


residence = Residence()
