"""The weights of one of ComfyUI's models on this rank: a ModelPatcher that merges patches and offloads blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import comfy.float
import comfy.hooks
import comfy.lora
import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from comfy.model_patcher import LowVramPatch, ModelPatcher, get_key_weight, key_param_name_to_key

from ...architectures.network_modules import large_layers, weight_bytes
from ...engine.prefetch import BlockPrefetcher, RankPlacement, offloaded_blocks
from ...loading.mapped import Backup, Mapped, cast, uncast_names

UNLIMITED_BYTES = 1e32
MERGED_AS_FETCHED = ("weight", "bias")  # of a layer that dynamic VRAM fetches
SMALL_BYTES = 16 * 1024  # of a layer that ComfyUI's dynamic VRAM loads at once (ModelPatcherDynamic.load)


def unload(patcher: ModelPatcher) -> None:
    """Unloads a MODEL and its clones; ComfyUI's own function for this is not in versions before 0.23."""
    loaded = comfy.model_management.current_loaded_models
    kept = [other for other in loaded if not patcher.is_clone(other.model)]
    comfy.model_management.free_memory(UNLIMITED_BYTES, patcher.load_device, kept)


def _leaves(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Returns the modules without modules inside, by name, in their order."""
    return [(name, module) for name, module in model.named_modules() if not list(module.children())]


@dataclass(frozen=True, eq=False)
class OffloadSet:
    """The modules whose weights some rank offloads or shards as its `placement` says: `blocks` in the order in which
    they run, and large `layers` outside of them. This rank keeps them on its device, except those `offloaded`."""

    placement: RankPlacement
    blocks: list[torch.nn.Module]
    layers: list[torch.nn.Module]
    offloaded: list[torch.nn.Module]

    @classmethod
    def of(cls, network: torch.nn.Module, blocks: list[torch.nn.Module], placement: RankPlacement) -> OffloadSet:
        least = min(placement.resident_counts)
        layers = [] if least else large_layers(network, blocks)
        local = offloaded_blocks(blocks, placement.resident_blocks, placement.resident_counts)
        on_any_rank = offloaded_blocks(blocks, least, placement.resident_counts)
        return cls(placement, on_any_rank, layers, [*local, *([] if placement.resident_blocks else layers)])


class DynamicVram:
    """What ComfyUI's dynamic VRAM does with each module of `network`, whose weights are as in the file: it loads small
    layers at once, fetches large ones for each use, and merges no patch into what is no layer of ComfyUI's
    (ModelPatcherDynamic.load). It has layers multiply in fp8 only where the file has fp8."""

    def __init__(self, network: torch.nn.Module) -> None:
        layers = [module for module in network.modules() if hasattr(module, "comfy_cast_weights")]
        sizes = {layer: comfy.model_management.module_size(layer) for layer in layers}
        self.small = {module for module, size in sizes.items() if size <= SMALL_BYTES}
        self.fetched = sizes.keys() - self.small
        for module in sizes:  # `fp8_linear` looks at the weight in main memory, which is as in the file
            if isinstance(module, comfy.ops.fp8_ops.Linear) and module.weight.dtype != torch.float8_e4m3fn:
                module.__class__ = comfy.ops.manual_cast.Linear


@dataclass(eq=False)
class WeightState:
    """The state of the weights that all clones share: whether layers are forced to cast, what is offloaded, the
    prefetcher that has it while the model is loaded, the names of layers that were `given_back`, which are in the file
    until the next load (on the CPU so many bytes), and what the host's dynamic VRAM does, if it has that."""

    force_cast: bool = False
    offload_set: OffloadSet | None = None
    prefetcher: BlockPrefetcher | None = None
    in_file_bytes: int = 0
    given_back_in_file_bytes: int = 0
    given_back: list[str] = field(default_factory=list)
    dynamic_vram: DynamicVram | None = None
    on_move: Callable[[], None] = lambda: None  # called when weights leave their memory


class RankPatcher(Mapped):
    """Loads the full model to the device, except its `offload_set`. Where patches change, it merges the new ones into
    the file's weights, and leaves weights without patches as they are.

    `on_progress` is called with the share of the modules that is on the device."""

    weight_state: WeightState
    on_progress: Callable[[float], None]

    def clone(self, *args: Any, **kwargs: Any) -> RankPatcher:
        made = super().clone(*args, **kwargs)
        made.weight_state = self.weight_state
        if self.weight_state.offload_set is not None:
            made.hook_mode = comfy.hooks.EnumHookMode.MinVram  # else it keeps every weight that hooks change
        return made

    def keeps_file_dtype(self, module: torch.nn.Module) -> bool:
        """Returns whether dynamic VRAM leaves this module's weights as they are in the file."""
        # It rounds a layer to the dtype of the model as it fetches it, and small layers are not fetched. Where the
        # model computes in that dtype, they are rounded as they are used, which is the same.
        computes_in_another = self.force_cast_weights or self.model.manual_cast_dtype is not None
        dynamic_vram = self.weight_state.dynamic_vram
        return computes_in_another and dynamic_vram is not None and module in dynamic_vram.small

    def patch_weight_to_device(self, key: str, device_to: torch.device | None = None, *args: Any, **kwargs: Any) -> Any:
        """Merges patches as the host's ComfyUI does: some in another way where it has dynamic VRAM, and none into a
        parameter of a module that has layers inside, or with dynamic VRAM of what is no layer."""
        if key in self.patches:
            module, name = self._owner(key)
            if any("." in parameter for parameter, _ in module.named_parameters()):
                return None
            if (dynamic_vram := self.weight_state.dynamic_vram) is not None:
                if not hasattr(module, "comfy_cast_weights"):
                    return None
                if module in dynamic_vram.fetched and name in MERGED_AS_FETCHED:
                    # Not where patches change the size of a weight of this layer.
                    layer = key.rpartition(".")[0]
                    patched = [each for each in (f"{layer}.{one}" for one in MERGED_AS_FETCHED) if each in self.patches]
                    weights = {each: comfy.utils.get_attr(self.model, each) for each in patched}
                    shape_of = comfy.lora.calculate_shape
                    if all(shape_of(self.patches[each], w, each) == w.shape for each, w in weights.items()):
                        return self._merge_as_fetched(key, module, device_to)
        return super().patch_weight_to_device(key, device_to, *args, **kwargs)

    def _merge_as_fetched(self, key: str, module: torch.nn.Module, device: torch.device | None) -> None:
        """Merges patches as dynamic VRAM does when it fetches a layer (`resolve_cast_module_with_vbar` of
        comfy/ops.py): in the dtype of computation, rounded with the layer's name as seed."""
        self._cast_to_merge(key)
        weight, set_weight, convert = get_key_weight(self.model, key)
        self.backup.setdefault(key, Backup(weight, False))
        device = device or weight.device
        if isinstance(module, comfy.ops.fp8_ops.Linear):
            dtype = comfy.model_management.lora_compute_dtype(device)
        else:
            dtype = self.object_patches.get("manual_cast_dtype") or self.model.get_dtype_inference()
        value = comfy.model_management.cast_to_device(weight, device, dtype, copy=True)
        merged = LowVramPatch(key, self.patches)(value if convert is None else convert(value, inplace=True))
        seed = comfy.utils.string_to_seed(key.rpartition(".")[0])
        if set_weight is None:
            rounded = comfy.float.stochastic_rounding(merged, weight.dtype, seed=seed)
            comfy.utils.set_attr_param(self.model, key, rounded)
        else:
            set_weight(merged, inplace_update=False, seed=seed)

    @contextmanager
    def state_dict_of_file(self) -> Iterator[None]:
        """Gives the state dict, in this context, dynamic VRAM's layers as the file has them: for a Control-LoRA."""
        if (dynamic_vram := self.weight_state.dynamic_vram) is None:
            yield
            return

        def restore(_: torch.nn.Module, state: dict[str, Any], *__: Any) -> None:
            for name, current in state.items():
                key = f"diffusion_model.{name}"
                view = self.file_views.get(key)
                changed = type(view) is torch.Tensor and (key in self.patches or view.dtype != current.dtype)
                if changed and self._owner(key)[0] in dynamic_vram.fetched:
                    state[name] = view

        handle = self.model.diffusion_model.register_state_dict_post_hook(restore)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def casting_as_natively(self) -> Iterator[None]:
        """Has layers cast their weights at each use, in this context, where ComfyUI has them do so, and only there."""
        # Those that do call no method of torch's layer, which a pack may have replaced.
        changed = []
        for module in self.model.modules():
            casts = getattr(module, "comfy_cast_weights", None)
            as_natively = self.force_cast_weights or self.weight_state.dynamic_vram is not None
            as_natively = as_natively or getattr(type(module), "comfy_cast_weights", False)
            if casts is not None and casts != as_natively:
                changed.append((module, casts, dict(module._parameters)))
                vars(module)["comfy_cast_weights"] = as_natively
                for name in [] if as_natively else uncast_names(module):
                    cast(module, name)
        try:
            yield
        finally:
            for module, casts, parameters in changed:
                vars(module)["comfy_cast_weights"] = casts
                module._parameters.update(parameters)

    def model_size(self) -> int:
        """Returns the bytes on the device, or those once loaded. Never 0, which means to ComfyUI that nothing is."""
        offload_set, prefetcher = self.weight_state.offload_set, self.weight_state.prefetcher
        if offload_set is None:
            return int(super().model_size())
        size = weight_bytes(self.model)  # counted anew: patches widen weights
        if prefetcher is not None:
            return max(1, size - int(prefetcher.nonresident_bytes))
        fraction = 1 - offload_set.placement.local_fraction
        return max(1, size - int(fraction * sum(map(weight_bytes, offload_set.offloaded))))

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        before, state = self.model.current_weight_patches_uuid, self.weight_state
        self._bring_back(device_to, patched=before == self.patches_uuid)
        is_other = state.force_cast != self.force_cast_weights or state.offload_set is not None
        if before in (None, self.patches_uuid) or not self.loaded_size() or self.hook_backup or is_other:
            loaded = super().partially_load(device_to, UNLIMITED_BYTES, force_patch_weights)
        else:  # these patches replace the last ones in the file's weights: ComfyUI would load all again
            state.on_move()
            with self.use_ejected(skip_and_inject_on_exit_only=True):
                for key in sorted(self.backup.keys() | self.patches.keys()):
                    if key in self.backup:
                        comfy.utils.set_attr_param(self.model, key, self.backup.pop(key).weight.to(device_to))
                    self.patch_weight_to_device(key, device_to=device_to)
                self.model.current_weight_patches_uuid = self.patches_uuid
                self.unpatch_model(unpatch_weights=False)
                self.patch_model(load_weights=False)
            loaded = 0
        state.force_cast = self.force_cast_weights
        return loaded

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        return 0

    def give_back(self, nbytes: int) -> None:
        """Drops weights of at least so many bytes from the device, the last layers first. The next load brings back
        these alone. Of a block that is fetched a rank has its shard."""
        state, freed = self.weight_state, 0
        if nbytes <= 0 or not self.loaded_size():
            return
        state.on_move()
        self.unpatch_hooks()
        fetched: set[torch.nn.Module] = set()
        if state.prefetcher is not None and state.offload_set is not None:
            before = state.prefetcher.source.given_back_bytes
            state.prefetcher.source.give_back(nbytes)
            freed = state.prefetcher.source.given_back_bytes - before
            self.model.model_loaded_weight_memory -= freed
            nbytes, freed = nbytes - freed, 0
            fetched = {module for unit in state.offload_set.offloaded for module in unit.modules()}
        for name, module in reversed(_leaves(self.model)):
            keys = [f"{name}.{key}" for key, parameter in module._parameters.items() if parameter is not None]
            if freed >= nbytes or name in state.given_back or module in fetched or not keys:
                continue
            if not self.file_views.keys() >= set(keys):
                continue
            freed += weight_bytes(module)
            for key in keys:
                self.backup.pop(key, None)
                comfy.utils.set_attr_param(self.model, key, self.file_views[key])
            state.given_back.append(name)
        self.model.model_loaded_weight_memory -= freed
        if self.load_device.type == "cpu":  # where the file's pages are the device's
            state.given_back_in_file_bytes += freed

    def _bring_back(self, device: torch.device, *, patched: bool) -> None:
        """Brings back the layers that were given back, with their patches where they are to be `patched`."""
        prefetcher = self.weight_state.prefetcher
        given_back = bool(self.weight_state.given_back)
        if prefetcher is not None and prefetcher.source.given_back_bytes:
            prefetcher.source.bring_back()
            given_back = True
        for name in self.weight_state.given_back:
            module = self.model.get_submodule(name)
            for key in [f"{name}.{key}" for key in module._parameters if patched]:
                if key in self.patches:
                    self.patch_weight_to_device(key, device_to=device)
            module.to(device)
            self.settle(module)
            vars(module)["comfy_patched_weights"] = True
        if given_back:
            self.weight_state.given_back, self.weight_state.given_back_in_file_bytes = [], 0
            self.model.model_loaded_weight_memory = self.model_size()

    def load(self, device_to: torch.device | None = None, *args: Any, **kwargs: Any) -> None:
        """Loads module by module, to report progress."""
        self.weight_state.on_move()
        prefetcher = self._filled_prefetcher(device_to) if self.weight_state.offload_set is not None else None
        modules = _leaves(self.model)
        for index, (name, module) in enumerate(modules):
            if not any(f"{name}.{key}" in self.patches for key in module._parameters):
                module.to(device_to)
            self.on_progress(index / len(modules))
        super().load(device_to, *args, **kwargs)
        if prefetcher is not None:
            prefetcher.seal()
            self.weight_state.prefetcher = prefetcher
            self.model.model_loaded_weight_memory = self.model_size()

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            self.weight_state.on_move()
            self.weight_state.given_back, self.weight_state.given_back_in_file_bytes = [], 0
            self.weight_state.in_file_bytes = 0
        if unpatch_weights and (prefetcher := self.weight_state.prefetcher):
            self.unpatch_hooks()
            prefetcher.close()
            self.weight_state.prefetcher = None
        super().unpatch_model(device_to, unpatch_weights)

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: Any, key: str, original_weights: Any, memory_counter: Any
    ) -> None:
        """Gives the module its full weight first where it is offloaded, since ComfyUI writes into the weight."""
        prefetcher, (module, name) = self.weight_state.prefetcher, self._owner(key)
        unit = prefetcher.find_fetched(module) if prefetcher is not None else None
        if prefetcher is None or unit is None or key not in combined_patches:
            super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)
            return
        device = self.model.device
        comfy.utils.set_attr_param(self.model, key, self.file_views[key])
        self.patch_weight_to_device(key, device_to=device)
        comfy.utils.set_attr_param(self.model, key, getattr(module, name).to(device, copy=True))
        self.settle(module)
        super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)
        self.hook_backup[key] = (self.backup[key].weight, device)
        prefetcher.override_weight(unit, module, name)

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        prefetcher = self.weight_state.prefetcher
        if prefetcher is not None and self.hook_backup:
            for key in [key for key in self.hook_backup if prefetcher.find_fetched(self._owner(key)[0])]:
                del self.hook_backup[key]
            prefetcher.restore_weights()
        super().unpatch_hooks(whitelist_keys_set)

    def _filled_prefetcher(self, device: torch.device | None) -> BlockPrefetcher:
        """Returns a prefetcher with the offload set's weights, patched and cast module by module as ComfyUI would."""
        offload_set = self.weight_state.offload_set
        assert offload_set is not None
        placement = offload_set.placement
        network: Any = getattr(self.model, "diffusion_model", self.model)
        prefetcher = BlockPrefetcher(network, placement.source(), placement.buffers)
        listed = {id(module): (name, params) for *_, name, module, params in self._load_list()}
        for number, unit in enumerate(units := [*offload_set.blocks, *offload_set.layers]):
            if any(parameter.is_meta for parameter in unit.parameters()):
                continue  # it is not in the file, and ComfyUI creates it
            for module in unit.modules():
                name, params = listed.get(id(module), ("", {}))
                for parameter in params:
                    self.patch_weight_to_device(key_param_name_to_key(name, parameter), device_to=device)
            unit.to(device)
            for module in unit.modules():
                self.settle(module)
                vars(module)["comfy_patched_weights"] = True  # or ComfyUI would patch them again
            resident = unit not in offload_set.offloaded
            path = next(name for name, module in self.model.named_modules() if module is unit)
            views = {name: self.file_views[f"{path}.{name}"] for name, _ in unit.named_parameters()}
            current = dict(unit.named_parameters())
            unpatched = all(view.data_ptr() == current[name].data_ptr() for name, view in views.items())
            if not prefetcher.source.staged and unpatched:  # main memory is the device: they stay in the mapped file
                self.weight_state.in_file_bytes += 0 if resident else weight_bytes(unit)
            else:
                prefetcher.add(unit, block=number < len(offload_set.blocks), resident=resident)
                for name, view in views.items():
                    self.backup.setdefault(f"{path}.{name}", Backup(view, False))
            self.on_progress(number / len(units))
        return prefetcher
