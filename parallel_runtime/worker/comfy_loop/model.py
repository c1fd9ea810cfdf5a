"""A model of ComfyUI's on this rank: its ModelPatcher, the weight patches on it, and the clone that a job runs with."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ...errors import Refused
from ...mapped import Mapped
from ..models import Model
from .code import rebuild

ALL = 1e32  # bytes: more than any device has

Patches = Mapping[str, list[Any]]


@dataclass(eq=False)
class Merged:
    """What is in the weights, for all clones together: the patches by weight, and whether layers cast by force."""

    patches: dict[str, list[Any]] = field(default_factory=dict)
    cast: bool = False


class Weights(Mapped):
    """Always on the device as a whole. Other patches than before are merged where they differ, into the file's weight.

    `on_share` hears the share of the modules that is on the device.
    """

    merged: Merged
    on_share: Callable[[float], None]

    def clone(self, *args: Any, **kwargs: Any) -> Weights:
        made = super().clone(*args, **kwargs)
        made.merged = self.merged
        return made

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        before = self.model.current_weight_patches_uuid
        anew = (
            before is None or not self.loaded_size() or self.hook_backup or self.merged.cast != self.force_cast_weights
        )
        if anew or before == self.patches_uuid:
            loaded = super().partially_load(device_to, ALL, force_patch_weights)
        else:
            loaded = self._repatch(device_to)
        self.merged.patches = {key: list(patches) for key, patches in self.patches.items()}
        self.merged.cast = self.force_cast_weights
        return loaded

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        return 0

    def load(self, device_to: torch.device | None = None, *args: Any, **kwargs: Any) -> None:
        """Module by module, so that the host hears of it."""
        modules = [(name, module) for name, module in self.model.named_modules() if not list(module.children())]
        for index, (name, module) in enumerate(modules):
            if not any(f"{name}.{key}" in self.patches for key in module._parameters):
                module.to(device_to)
            self.on_share(index / len(modules))
        super().load(device_to, *args, **kwargs)

    def _repatch(self, device: torch.device) -> int:
        """ComfyUI's own answer to any change is to unload the model and to load it again."""
        before, now = self.merged.patches, self.patches
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            for key in sorted(key for key in before.keys() | now if before.get(key) != now.get(key)):
                if key in self.backup:
                    comfy.utils.set_attr_param(self.model, key, self.backup.pop(key).weight.to(device))
                self.patch_weight_to_device(key, device_to=device)
            self.model.current_weight_patches_uuid = self.patches_uuid
            self.unpatch_model(unpatch_weights=False)
            self.patch_model(load_weights=False)
        return 0


@dataclass(eq=False)
class ComfyModel(Model):
    """`patcher` is what was loaded, nothing on it; `patched` the last stack of patches, by name and rebuilt."""

    patcher: Any = None
    patched: tuple[str, dict[str, list[Any]]] = field(default=("", {}))

    @property
    def weight_bytes(self) -> int:
        return self.patcher.model_size()

    def clone(self, patches: Patches | None, on_share: Callable[[float], None]) -> Weights:
        """A MODEL with `spec.patches` on it, as nodes/patches.py describes them; None where they are here."""
        if self.patched[0] != self.spec.patches:
            if patches is None:
                raise Refused("the weight patches of this model were not sent")
            self.patched = (self.spec.patches, {key: rebuild(value) for key, value in patches.items()})
        made: Weights = self.patcher.clone()
        made.on_share = on_share
        made.patches = {key: list(value) for key, value in self.patched[1].items()}
        if self.spec.compute_dtype:
            made.set_model_compute_dtype(getattr(torch, self.spec.compute_dtype))
        made.patches_uuid = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.spec.patches} {self.spec.compute_dtype}")
        return made

    def rest(self) -> None:
        comfy.model_management.unload_model_and_clones(self.patcher)

    def wake(self, device: torch.device) -> None:
        """ComfyUI loads the clone that a job runs with."""
