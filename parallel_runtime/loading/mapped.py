"""Models loaded by ComfyUI's own loaders, with weights that stay views of the mapped file, or by the loader node of a
pack. Knows no worker.

ComfyUI builds what `comfy.model_patcher.CoreModelPatcher` names, and has weights assigned instead of copied where that
class says it is dynamic: its main.py replaces the same attribute. Its loader of checkpoints would load a model to a GPU
that has more free memory than the machine, before anybody asks for it: here all models begin in main memory.

A node is called as ComfyUI's executor does: in each worker with the inputs that it had in ComfyUI. Samples of the
weights tell whether it has made the same MODEL or CLIP.
"""

from __future__ import annotations

import copy
import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import Refused
from .code_names import is_of_a_pack, qualified_name
from .fingerprint import fingerprint, stored_samples

Kind = TypeVar("Kind", bound="Mapped")
LOADED_LATER = {  # functions of comfy.model_management while a loader runs
    "unet_inital_load_device": lambda *_: torch.device("cpu"),
    "text_encoder_initial_device": lambda *_: torch.device("cpu"),
    "load_models_gpu": lambda *_, **__: None,
}
Backup = namedtuple("Backup", ["weight", "inplace_update"])  # as ComfyUI's, which has no name
_missing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # of a text encoder: weights of no file


class Mapped(ModelPatcher):
    """A static ModelPatcher whose copy in main memory is the file's pages: unloading drops the device's, moves nothing.

    `file_views` maps parameter names to these views, for all clones. Where the file holds another dtype than
    ComfyUI would, they are cast on the device, or as they are used.
    """

    file_views: dict[str, Tensor]
    _assigning = False

    def is_dynamic(self) -> bool:
        return Mapped._assigning

    def clone(self: Kind, *args: Any, **kwargs: Any) -> Kind:
        made = super().clone(*args, **kwargs)
        made.file_views = self.file_views
        return made

    def load(self, device_to: torch.device | None = None, *args: Any, **kwargs: Any) -> None:
        super().load(device_to, *args, **kwargs)
        for module in self.model.modules():
            self.settle(module)

    def settle(self, module: Any) -> None:
        """Casts the module's own weights and buffers, which are on their device, to the dtype computed from."""
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(getattr(module, f"{name}_comfy_model_dtype", buffer.dtype))
        for name in uncast_names(module):
            weight, dtype = module._parameters[name], getattr(module, f"{name}_comfy_model_dtype")
            # On the CPU, where the file's pages are the weights, ComfyUI's layer widens them at each use, to the bit.
            widens = weight.device.type == "cpu" and dtype.itemsize > weight.dtype.itemsize
            if hasattr(module, "comfy_cast_weights") and (widens or self.keeps_file_dtype(module)):
                module.comfy_cast_weights = True
            else:
                cast(module, name)

    def keeps_file_dtype(self, module: torch.nn.Module) -> bool:
        """Returns whether ComfyUI computes from this module's weights as in the file, not in the model's dtype."""
        return False

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        """Gives a weight that patches change the dtype that ComfyUI would have merged them into."""
        if key in self.patches:
            self._cast_to_merge(key)
        return super().patch_weight_to_device(key, *args, **kwargs)

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: Any, key: str, original_weights: Any, memory_counter: Any
    ) -> None:
        uncast = key in combined_patches and self._cast_to_merge(key)
        super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)
        if uncast:
            self.hook_backup[key] = (self.file_views[key], self.hook_backup[key][1])

    def patch_cached_hook_weights(self, cached_weights: Any, key: str, memory_counter: Any) -> None:
        uncast = self._cast_to_merge(key)
        super().patch_cached_hook_weights(cached_weights, key, memory_counter)
        if uncast:
            self.hook_backup[key] = (self.file_views[key], self.hook_backup[key][1])

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        """Makes a weight that was cast for a hook a view of the file again."""
        for key in [key for key in self.hook_backup if not whitelist_keys_set or key in whitelist_keys_set]:
            if (view := self.hook_backup[key][0]) is self.file_views.get(key):
                comfy.utils.set_attr_param(self.model, key, view)
                del self.hook_backup[key]
        super().unpatch_hooks(whitelist_keys_set)

    def _cast_to_merge(self, key: str) -> bool:
        """Gives this weight ComfyUI's dtype; returns False where it has that already."""
        module, name = self._owner(key)
        if name not in uncast_names(module) or self.keeps_file_dtype(module):
            return False
        cast(module, name)
        return True

    def _owner(self, key: str) -> tuple[Any, str]:
        """Returns what has this weight or attribute, mostly a module, and its name there."""
        path, _, name = key.rpartition(".")
        return comfy.utils.get_attr(self.model, path) if path else self.model, name

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        replaced = [*self.object_patches_backup]
        super().unpatch_model(None if unpatch_weights else device_to, unpatch_weights)
        for owner, name in map(self._owner, replaced):  # a class's method on a layer would hide that of the next class
            left = getattr(owner, "__dict__", {}).get(name)
            if isinstance(left, MethodType) and left.__func__ is getattr(type(owner), name, None):
                delattr(owner, name)
        if unpatch_weights and device_to is not None:
            for name, view in self.file_views.items():
                comfy.utils.set_attr_param(self.model, name, view)
            self.model.to(device_to)  # buffers
            self.model.device = device_to


def has_dynamic_vram() -> bool:
    """Returns whether this ComfyUI has dynamic VRAM on. In the versions that we know, only its main.py turns it on."""
    dynamic = issubclass(comfy.model_patcher.CoreModelPatcher, getattr(comfy.model_patcher, "ModelPatcherDynamic", ()))
    return dynamic or getattr(comfy.memory_management, "aimdo_enabled", False)


def load_mapped(kind: type[Kind], load: Callable[..., Any], arguments: Sequence[Any], index: int | None) -> Kind:
    """Returns the `kind` that `load(*arguments)` makes, or the one at `index` of what it makes.

    Formats that a loader holds in wrappers of its own (quantised, GGUF) stay as it made them.
    """
    with calls_loader(kind):
        made = load(*arguments)
    return with_views(made if index is None else made[index])


@contextmanager
def calls_loader(kind: type[Mapped]) -> Iterator[None]:
    """Has ComfyUI's loaders, in this context, make a `kind` of patcher with weights that are views of the file."""
    with (
        with_attributes(comfy.model_patcher, CoreModelPatcher=kind),
        with_attributes(Mapped, _assigning=True),
        with_attributes(comfy.model_management, **LOADED_LATER),
    ):
        yield


@contextmanager
def with_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Gives a module, class or object these values of attributes in this context, and its own back at the end."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def with_views(patcher: Kind) -> Kind:
    """Returns a loaded patcher, which keeps its weights in main memory for unloading."""
    # Not `.data`, which is of a wrapper's class without what makes it one.
    patcher.file_views = {name: parameter.detach() for name, parameter in patcher.model.named_parameters()}
    return patcher


def uncast_names(module: torch.nn.Module) -> list[str]:
    """Returns the names of parameters of numbers, not of codes for them, that have another dtype than ComfyUI's loader
    would have copied them into."""
    own = {name: x for name, x in module._parameters.items() if not (x is None or hasattr(x, "__tensor_flatten__"))}
    plain = {name: x.dtype for name, x in own.items() if x.dtype.is_floating_point}
    return [name for name, dtype in plain.items() if getattr(module, f"{name}_comfy_model_dtype", dtype) != dtype]


def cast(module: Any, name: str) -> None:
    """Casts a weight to the dtype into which ComfyUI's loader would have copied it."""
    with torch._C.DisableTorchFunctionSubclass():  # a plain weight, also where a pack's file has another class
        value = module._parameters[name].detach().as_subclass(Tensor).to(getattr(module, f"{name}_comfy_model_dtype"))
    module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)


def load_by_node(kind: type[Kind], node: Any, inputs: dict[str, Any]) -> list[Kind]:
    """Calls a node, and returns the MODELs and CLIPs' text encoders among what it gives, as `kind`s of patcher."""
    v3 = hasattr(node, "GET_SCHEMA")
    with calls_loader(kind):
        made = node.execute(**inputs) if v3 else getattr(node(), node.FUNCTION)(**inputs)
    patchers = []
    for one in tree_leaves(made.args if v3 else made):
        patcher: Any = one.patcher if isinstance(one, comfy.sd.CLIP) else one
        if isinstance(patcher, ModelPatcher):
            kinds: tuple[Any, Any] = (kind, type(patcher))
            if not isinstance(patcher, kind):  # it keeps what a pack's class does otherwise
                patcher.__class__ = kind if kinds[1] is ModelPatcher else _kind_of_pack(*kinds)
            patchers.append(with_views(patcher))
    return patchers


def load_same(kind: type[Kind], node: Any, call: dict[str, Any], expected: str, *, text_encoder: bool) -> Kind | None:
    """Returns the MODEL or text encoder of a node's `call` whose fingerprint is `expected`, None where it gives none.
    Raises Refused where it fails."""
    for name, paths in call["folders"].items():
        known = folder_paths.folder_names_and_paths.setdefault(name, ([], set()))[0]
        if isinstance(known, list):
            known[:] = paths  # in place: packs share these lists
    try:
        models = load_by_node(kind, node, call["inputs"])
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError) as error:
        name, text = qualified_name(node), f"{type(error).__name__}: {error}"
        raise Refused("clip.loader" if text_encoder else "loader.fails", node=name, error=text) from error
    same = next((model for model in models if network_fingerprint(model) == expected), None)
    if same is not None:
        for (_, module, name), kept in zip(_parameters(same), call["kept"], strict=True):
            if kept == "1":
                vars(module)[f"{name}_comfy_model_dtype"] = getattr(module, name).dtype
    return same


def kept_dtypes(model: ModelPatcher) -> str:
    """Tells of each weight that a node has loaded whether it is in another dtype than ComfyUI's loader would have
    copied it into: "1" where the pack has put it there itself, or has taken dynamic VRAM, which copies none, off a
    loaded model."""
    knows = not isinstance(model, Mapped) or has_dynamic_vram()
    keeps = knows and not model.is_dynamic()
    return "".join("01"[keeps and name in uncast_names(module)] for _, module, name in _parameters(model))


def _parameters(model: ModelPatcher) -> list[tuple[str, nn.Module, str]]:
    """Returns a MODEL's or CLIP's parameters in the order of their names, each with its module and its name there."""
    owned = ((path, module, name) for path, module in _layers(model).items() for name in module._parameters)
    return sorted((one for one in owned if one[1]._parameters[one[2]] is not None), key=itemgetter(0, 2))


def note_missing() -> None:
    """Has ComfyUI note which weights of a text encoder no file has: they are whatever was in memory."""
    load_weights = comfy.sd.CLIP.load_sd

    @functools.wraps(load_weights)
    def noting(clip: comfy.sd.CLIP, *args: Any, **kwargs: Any) -> Any:
        keys = load_weights(clip, *args, **kwargs)
        if isinstance(keys, tuple):  # the missing and the unexpected ones
            _missing.setdefault(clip.cond_stage_model, set()).update(keys[0])
        return keys

    comfy.sd.CLIP.load_sd = noting


def network_fingerprint(model: ModelPatcher) -> str:
    """Fingerprints a MODEL or CLIP as its loader has made it: its class if that is a pack's, the classes of its layers,
    and samples of the files' weights as they are without patches, in the dtype that ComfyUI's loader copies them into.
    """
    backup = {name: kept.weight for name, kept in model.backup.items()}
    backup |= {name: weight for name, (weight, _) in model.hook_backup.items()}
    modules = _layers(model)
    missing = tuple(f".{name}" for name in _missing.get(model.model, ()))  # below the encoder that the file is of
    classes = [qualified_name(one) for one in type(model).__mro__ if is_of_a_pack(one)]
    layers = [f"{path} {qualified_name(type(one))}" for path, one in modules.items()]
    samples = []
    for path, module in modules.items():
        for name, weight in sorted((module._parameters | module._buffers).items()):  # dynamic VRAM has another order
            key = f"{path}.{name}"
            if weight is None or name in module._non_persistent_buffers_set or weight.is_meta:
                continue
            if not f".{key}".endswith(missing):
                dtype = getattr(module, f"{name}_comfy_model_dtype", None)
                samples += stored_samples(backup.get(key, weight), dtype)
    return fingerprint(*classes, *layers, *samples)[:32]


def _layers(model: ModelPatcher) -> dict[str, nn.Module]:
    """Returns the network of a MODEL, or the text encoder of a CLIP, and all modules in it without object patches."""
    path = "diffusion_model" if isinstance(model.model, BaseModel) else ""
    modules = dict(model.model.get_submodule(path).named_modules(prefix=path))
    for name, before in model.object_patches_backup.items():
        if isinstance(before, nn.Module):
            modules = {path: one for path, one in modules.items() if not path.startswith(f"{name}.")}
            modules |= dict(before.named_modules(prefix=name))
    return dict(sorted(modules.items()))


@cache
def _kind_of_pack(kind: Any, of_pack: Any) -> Any:
    class OfPack(kind, of_pack):
        """Patches weights as the pack does; the weights themselves are not moved."""

        mmap_released = True  # else ComfyUI-GGUF copies what is mapped

        def clone(self, *args: Any, **kwargs: Any) -> Any:
            made = kind.clone(self, *args, **kwargs)
            made.__class__ = OfPack  # the pack makes one of its own class
            return made

        def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
            """Copies the weight's tensor object first: ComfyUI-GGUF writes patches onto it, beside its bytes."""
            if key in self.patches:
                weight = comfy.utils.get_attr(self.model, key)
                self.backup.setdefault(key, Backup(weight, False))
                comfy.utils.set_attr_param(self.model, key, copy.copy(weight))
            return super().patch_weight_to_device(key, *args, **kwargs)

    return OfPack
