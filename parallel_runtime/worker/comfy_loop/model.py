"""A model of ComfyUI's on this rank: its ModelPatcher, the weight patches on it, and the clone that a job runs with."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...errors import Refused
from ..models import Model, Unrecordable
from ..ranks import agree, everybodys
from ..step_cache import StepCache
from ..weights.places import Place
from .code import rebuild
from .patch_models import PatchModels
from .weights import Away, Weights

Patches = Mapping[str, list[Any]]
PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)  # what older cards compute in first
OPTIONS = "transformer_options"
OVERRIDE = "optimized_attention_override"
UNSEEN = ("uuids", "callbacks")  # of conditions, and of the loop around the network
OUTSIDE = {value for name, value in vars(WrappersMP).items() if name.isupper()} - {WrappersMP.DIFFUSION_MODEL}


@dataclass(eq=False)
class ComfyModel(Model):
    """`patcher` is what was loaded, nothing on it; `patched` the last stack of patches, by name and rebuilt."""

    patcher: Any = None
    patched: tuple[str, dict[str, list[Any]]] = field(default=("", {}))
    cache: StepCache | None = None  # of the run in progress: it decides which blocks run
    patch_models: PatchModels = field(default_factory=PatchModels)  # this rank's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.patcher.merged.moved = self.recording.drop

    @property
    def away_bytes(self) -> int:
        merged = self.patcher.merged
        return merged.in_file_bytes + (merged.store.away_bytes - merged.store.device_bytes if merged.store else 0)

    @cached_property
    def computed(self) -> torch.dtype | None:
        """In what all ranks compute, where ComfyUI would choose by their devices: a card without bfloat16 computes in
        float16 or float32, and what ranks exchange is of one type. Collective."""
        own = self.patcher.model.get_dtype_inference()
        ranks = everybodys(PRECISIONS.index(own) if own in PRECISIONS else len(PRECISIONS))
        return PRECISIONS[min(ranks)] if len(set(ranks)) > 1 else None

    def keep(self, place: Place | None) -> None:
        """Have the weights at rest there, from the next load on; None: whole on the device."""
        merged, place = self.patcher.merged, place if self.architecture else None
        if place is not (merged.away and merged.away.place):
            self.rest()
            merged.away = Away.of(self.network, self.architecture.plan, place) if place and self.architecture else None

    def load(self, patcher: Weights) -> None:
        """Put it on the device. Where there is too little room on any rank, all of them let the other models go:
        ComfyUI would do so by each rank's own memory, and ranks that gather must stay alike."""
        device = patcher.load_device
        if device.type != "cpu":
            together = [patcher, *patcher.model_patches_models()]
            needed = 1.1 * sum(one.model_size() - one.loaded_size() for one in together)
            needed += comfy.model_management.minimum_inference_memory()
            if agree(comfy.model_management.get_free_memory(device) < needed):
                for loaded in list(comfy.model_management.current_loaded_models):
                    if loaded.model is not None and not any(one.is_clone(loaded.model) for one in together):
                        comfy.model_management.unload_model_and_clones(loaded.model)
        comfy.model_management.load_models_gpu([patcher])

    def reach(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return reaching(kwargs, self.attention)

    def objection(self) -> str:
        current = self.patcher.model.current_patcher
        if self.patcher.merged.away is not None:
            return "weights are fetched block by block"
        if self.cache is not None:
            return "a step cache decides which blocks run"
        if current is not None and (current.hook_patches or current.forced_hooks):
            return "hooks (scheduled LoRA) change weights from step to step"
        return super().objection()

    def clone(self, patches: Patches | None, on_share: Callable[[float], None]) -> Weights:
        """A MODEL with `spec.patches` on it, as nodes/patches.py describes them; None where they are here."""
        if self.patched[0] != self.spec.patches:
            if patches is None:
                raise Refused("the weight patches of this model were not sent")
            self.patched = (self.spec.patches, {key: rebuild(value) for key, value in patches.items()})
        made: Weights = self.patcher.clone()
        made.on_share = on_share
        elsewhere = tuple(f"diffusion_model.{seat.path}." for seat in self.elsewhere)
        made.patches = {key: list(value) for key, value in self.patched[1].items() if not key.startswith(elsewhere)}
        if computed := getattr(torch, self.spec.compute_dtype) if self.spec.compute_dtype else self.computed:
            made.set_model_compute_dtype(computed)
        made.patches_uuid = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.spec.patches} {self.spec.compute_dtype}")
        return made

    @property
    def beside(self) -> list[torch.nn.Module]:
        return [patcher.model for patcher in self.patch_models.beside(self)]

    def rest(self) -> None:
        comfy.model_management.unload_model_and_clones(self.patcher)
        self.patcher.size = 0  # next time it may have other blocks
        self.patch_models.let_go(self)

    def wake(self, device: torch.device) -> None:
        """ComfyUI loads the clone that a job runs with."""


def reaching(kwargs: dict[str, Any], attention: Any) -> dict[str, Any]:
    """`kwargs` of a network's call without what its code does not ask for; `attention` is an override of our own.

    Raises Unrecordable for code that runs inside the network: it may decide by value, or be another from step to step;
    and for tensors in lists or dicts, where the network may keep what it made, as causal Wan does.
    """
    if (given := kwargs.get(OPTIONS)) is None:
        return kwargs
    options = {name: value for name, value in given.items() if name not in UNSEEN}
    wrappers = {kind: found for kind, found in options.pop("wrappers", {}).items() if kind not in OUTSIDE}
    inside = {
        "wrappers": _kinds(wrappers),
        "patches": _kinds(options.get("patches")),
        "replaced blocks": _kinds(options.get("patches_replace")),
    }
    for what, kinds in inside.items():
        if kinds:
            raise Unrecordable(f"{what} inside the network ({', '.join(kinds)})")
    if options.get(OVERRIDE) is not attention:
        raise Unrecordable("a node replaces the attention")
    for name, value in options.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value) if leaf is not value):
            raise Unrecordable(f"the network may keep something in {name}")
    return {**kwargs, OPTIONS: options}


def _kinds(found: dict[str, Any] | None) -> list[str]:
    return sorted(str(kind) for kind, functions in (found or {}).items() if functions)
