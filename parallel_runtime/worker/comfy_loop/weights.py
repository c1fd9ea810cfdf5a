"""The weights of one of ComfyUI's models on this rank: a ModelPatcher that merges patches and knows what is away."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import comfy.hooks
import comfy.utils
import torch
from comfy.model_patcher import key_param_name_to_key

from ...blocks import blocks_of
from ...mapped import Backup, Mapped
from ...plan import Plan
from ..weights.places import Place
from ..weights.store import Store, fetched_of, large_layers, weight_bytes

ALL = 1e32  # bytes: more than any device has


@dataclass(frozen=True, eq=False)
class Away:
    """Modules of whose weights some rank has only a share on its device at rest, the others in a `place`: `blocks` in
    the order in which they run, and `others`. This rank has them whole, but for those `fetched`."""

    place: Place
    blocks: list[torch.nn.Module]
    others: list[torch.nn.Module]
    fetched: list[torch.nn.Module]

    @classmethod
    def of(cls, network: torch.nn.Module, plan: Plan, place: Place) -> Away:
        blocks, least = blocks_of(network, plan), min(place.residents)
        others = [] if least else large_layers(network, blocks)
        fetched = fetched_of(blocks, place.resident, place.residents)
        away = fetched_of(blocks, least, place.residents)
        return cls(place, away, others, [*fetched, *([] if place.resident else others)])


@dataclass(eq=False)
class Merged:
    """What is in the weights, for all clones together: the patches by weight, whether layers cast by force, what is
    away, and the store that it is in while the model is loaded."""

    patches: dict[str, list[Any]] = field(default_factory=dict)
    cast: bool = False
    away: Away | None = None
    store: Store | None = None
    in_file_bytes: int = 0
    moved: Callable[[], None] = lambda: None  # hears when weights are no longer where they were


class Weights(Mapped):
    """On the device as a whole, but for what is `away`. Other patches than before are merged where they differ, into
    the file's weight.

    `on_share` hears the share of the modules that is on the device.
    """

    merged: Merged
    on_share: Callable[[float], None]

    def clone(self, *args: Any, **kwargs: Any) -> Weights:
        made = super().clone(*args, **kwargs)
        made.merged = self.merged
        if self.merged.away is not None:
            made.hook_mode = comfy.hooks.EnumHookMode.MinVram  # else it keeps every weight that hooks change
        return made

    def model_size(self) -> int:
        """What the device holds, or would. Never 0: that would mean to ComfyUI that nothing is loaded."""
        away, store = self.merged.away, self.merged.store
        if away is None:
            return int(super().model_size())
        size = weight_bytes(self.model)  # not what it was when it was loaded: patches widen weights
        elsewhere = (1 - away.place.share) * sum(map(weight_bytes, away.fetched))
        return max(1, size - int(elsewhere if store is None else store.away_bytes - store.device_bytes))

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        before = self.model.current_weight_patches_uuid
        anew = (
            before is None
            or not self.loaded_size()
            or self.hook_backup
            or self.merged.cast != self.force_cast_weights
            or self.merged.away is not None
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
        self.merged.moved()
        store = self._stored(device_to) if self.merged.away is not None else None
        modules = [(name, module) for name, module in self.model.named_modules() if not list(module.children())]
        for index, (name, module) in enumerate(modules):
            if not any(f"{name}.{key}" in self.patches for key in module._parameters):
                module.to(device_to)
            self.on_share(index / len(modules))
        super().load(device_to, *args, **kwargs)
        if store is not None:
            store.seal()
            self.merged.store = store
            self.model.model_loaded_weight_memory = self.model_size()

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            self.merged.moved()
        if unpatch_weights and (store := self.merged.store):
            self.unpatch_hooks()
            store.close()
            self.merged.store, self.merged.in_file_bytes = None, 0
        super().unpatch_model(device_to, unpatch_weights)

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: Any, key: str, original_weights: Any, memory_counter: Any
    ) -> None:
        """ComfyUI writes into the weight; one that is in the store has to be whole for that."""
        store, (module, name) = self.merged.store, self._owner(key)
        unit = store.unit_of(module) if store is not None else None
        if store is None or unit is None or key not in combined_patches:
            super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)
            return
        device = self.model.device
        comfy.utils.set_attr_param(self.model, key, self.own[key])
        self.patch_weight_to_device(key, device_to=device)
        comfy.utils.set_attr_param(self.model, key, getattr(module, name).to(device, copy=True))
        self.settle(module)
        super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)
        self.hook_backup[key] = (self.backup[key].weight, device)
        store.change(unit, module, name)

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        store = self.merged.store
        if store is not None and self.hook_backup:
            for key in [key for key in self.hook_backup if store.unit_of(self._owner(key)[0])]:
                del self.hook_backup[key]
            store.restore()
        super().unpatch_hooks(whitelist_keys_set)

    def _stored(self, device: torch.device | None) -> Store:
        """What is away, in a new store: patched and cast as ComfyUI would, module by module."""
        away = self.merged.away
        assert away is not None
        store = Store(self.model.diffusion_model, away.place.source(), away.place.buffers)
        listed = {id(module): (name, params) for *_, name, module, params in self._load_list()}
        for number, unit in enumerate(units := [*away.blocks, *away.others]):
            if any(parameter.is_meta for parameter in unit.parameters()):
                continue  # the file has not got it, and ComfyUI makes it up
            for module in unit.modules():
                name, params = listed.get(id(module), ("", {}))
                for parameter in params:
                    self.patch_weight_to_device(key_param_name_to_key(name, parameter), device_to=device)
            unit.to(device)
            for settled in unit.modules():
                self.settle(settled)
                vars(settled)["comfy_patched_weights"] = True  # or ComfyUI would patch them again
            self._put(store, unit, block=number < len(away.blocks), kept=unit not in away.fetched)
            self.on_share(number / len(units))
        return store

    def _put(self, store: Store, unit: torch.nn.Module, *, block: bool, kept: bool) -> None:
        own = {name: self.own[name] for name in self._names(unit)}
        current = dict(zip(own, unit.parameters(), strict=True))
        # Main memory is the device: what no patch changes is fine where it is.
        if not store.source.staged and all(own[name].data_ptr() == current[name].data_ptr() for name in own):
            self.merged.in_file_bytes += 0 if kept else weight_bytes(unit)
            return
        store.put(unit, block=block, kept=kept)
        for name, weight in own.items():
            self.backup.setdefault(name, Backup(weight, False))

    def _names(self, unit: torch.nn.Module) -> Iterator[str]:
        """Of its parameters, as the model calls them."""
        path = next(name for name, module in self.model.named_modules() if module is unit)
        return (f"{path}.{name}" for name, _ in unit.named_parameters())

    def _owner(self, key: str) -> tuple[torch.nn.Module, str]:
        path, _, name = key.rpartition(".")
        return self.model.get_submodule(path), name

    def _repatch(self, device: torch.device) -> int:
        """ComfyUI's own answer to any change is to unload the model and to load it again."""
        self.merged.moved()
        before, now = self.merged.patches, self.patches
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            for key in sorted(key for key in before.keys() | now if not _same(before.get(key, []), now.get(key, []))):
                if key in self.backup:
                    comfy.utils.set_attr_param(self.model, key, self.backup.pop(key).weight.to(device))
                self.patch_weight_to_device(key, device_to=device)
            self.model.current_weight_patches_uuid = self.patches_uuid
            self.unpatch_model(unpatch_weights=False)
            self.patch_model(load_weights=False)
        return 0


def _same(before: list[Any], now: list[Any]) -> bool:
    """The very patches: some are tensors, which have no truth of being equal."""
    return len(before) == len(now) and all(map(operator.is_, before, now))
