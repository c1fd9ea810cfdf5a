"""Where a MODEL comes from: whether its network is what its file gives, since nodes may have changed it in place; and,
where it names no file, the node that has made it.

The file is loaded once more, as CP Load Diffusion Model does it, when a MODEL is first seen: its weights stay views of
the mapped file, of which samples are read. Plain values that differ are sent; all else that differs is refused.

torch tells us of each network that is put into a model, and ComfyUI which node of which prompt runs at that moment.
Workers call that node with the same inputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import comfy.ops
import folder_paths
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph import NodeNotFoundError
from comfy_execution.graph_utils import is_link
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from nodes import NODE_CLASS_MAPPINGS  # type: ignore[attr-defined]  # ComfyUI's module, not our package
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_runtime.errors import Refused, quoted
from ...parallel_runtime.loading.code_names import (
    Unsendable,
    files_of,
    is_comfyui,
    packs_named,
    qualified_name,
    reference,
)
from ...parallel_runtime.loading.fingerprint import sample, stat_file
from ...parallel_runtime.loading.mapped import Mapped, network_fingerprint
from ...parallel_runtime.loading.object_codec import PLAIN
from ...parallel_runtime.loading.pack_states import reached, reads
from ...parallel_runtime.loading.replaced_code import is_in_a_pack, name_in_pack
from ...parallel_runtime.specs import ModelSpec
from .foreign_code import code_on
from .model_patches import native_model

NETWORK, LATENT_FORMAT = "diffusion_model", "latent_format"
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # whose modules run because they are there
WEIGHT_TYPES = (Tensor, nn.Parameter)  # of weights that are compared
CACHED = "_cached"  # ends the names of what a forward keeps for longer sequences


@dataclass(frozen=True, kw_only=True)
class KnownPart:
    """A module, or a plain object of ComfyUI's in one: its class, and the names of its attributes and children, of them
    those that are plain with their values, and those that are tensors."""

    kind: str
    names: frozenset[str]
    code: frozenset[str]  # those with code of packs
    values: dict[str, Any]
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """What a file gives: by path the parts of the network and its LatentFormat, by name samples of the weights and the
    weights' shapes. Weights that are not in the file are left out."""

    parts: dict[str, KnownPart]
    samples: dict[str, Tensor]
    shapes: dict[str, torch.Size]


_loaded: WeakKeyDictionary[nn.Module, Loaded] = WeakKeyDictionary()  # by the network that was compared with it


@torch.no_grad()
def changed_attributes(model: ModelPatcher, path: str, load: Callable[[], Mapped]) -> str:
    """Returns the plain attributes that are not those of a network that `load` gives from the file at `path`: JSON for
    ModelSpec. Raises Refused for weights, modules and other values that are not."""
    model = native_model(model)
    network = model.model.diffusion_model
    loaded, parts = _loaded.get(network) or _load(load), dict(_parts(model.model.latent_format, network))
    for name, before in model.object_patches_backup.items():  # as it is without the MODEL that ComfyUI has loaded now
        if isinstance(before, nn.Module):
            parts |= dict(before.named_modules(prefix=name))
    _check_modules(parts, loaded, path)
    _check_weights(parts, model, loaded, path)
    _loaded[network] = loaded  # not before: the file may have been replaced, and put back later
    return _plain_changes(parts, model, loaded.parts, path)


def changed_since_made(model: ModelPatcher, made: dict[str, KnownPart], path: str) -> str:
    """Returns as `changed_attributes` what plain attributes are not as `made`, `parts_of` a network as a node put it
    into its model. Workers compare its layers and weights."""
    parts = dict(_parts(model.model.latent_format, model.model.diffusion_model))
    before = {}
    for name, part in made.items():
        if name in parts and _kind_of(parts[name]) == part.kind:
            now = vars(parts[name])  # a loader may put a weight where None was
            before[name] = replace(part, values={key: part.values[key] for key in part.values if key in now})
    return _plain_changes(parts, model, before, path)


def code_in_place(model: ModelPatcher) -> dict[str, Any]:
    """Returns by name what nodes have put onto parts of MODEL's network, without object patches: functions, methods and
    classes of packs, and what else these name of attributes that the parts did not have when they were loaded."""
    model = native_model(model)
    parts, loaded = dict(_parts(model.model.latent_format, model.model.diffusion_model)), known_parts(model)
    known = {path: part for path, part in loaded.items() if path.startswith(NETWORK) and path in parts}
    found: dict[str, Any] = {}
    for path, part in known.items():
        if is_in_a_pack(kind := type(parts[path])) and _kind_of(parts[path]) != part.kind:
            found[f"{path}.__class__"] = kind
        on_part = code_on(parts[path], model.object_patches.get(f"{path}.__class__"))
        found |= {f"{path}.{name}": one for name, one in on_part.items() if name not in part.code}
    found = {name: one for name, one in found.items() if name not in model.object_patches_backup}
    code = [*found.values(), *model.object_patches.values()]
    is_read = reads(reached(code))
    for path, part in known.items() if code else ():
        for name, value in _all_attributes(parts[path]).items():
            if is_read(name) and name not in part.names and not _is_bookkeeping(name):
                found[f"{path}.{name}"] = value
    return found


def known_parts(model: ModelPatcher) -> dict[str, KnownPart]:
    """Returns the parts of MODEL's network as they were loaded, once it has been compared with its file or node."""
    loaded = _loaded.get(model.model.diffusion_model)
    return _calls[model.model].made if loaded is None else loaded.parts


def _plain_changes(parts: dict[str, Any], model: ModelPatcher, before: dict[str, KnownPart], path: str) -> str:
    changed = dict(_changed_values(parts, model, before))
    for name, (found, expected) in changed.items():
        if not isinstance(found, PLAIN) or not isinstance(expected, PLAIN):
            _refuse(name, quoted(found), quoted(expected), path)
    return json.dumps({name: found for name, (found, _) in changed.items()}) if changed else ""


def _refuse(name: str, found: str, expected: str, path: str) -> None:
    raise Refused("network.edited", name=name.removeprefix(f"{NETWORK}."), found=found, expected=expected, path=path)


def _load(load: Callable[[], Mapped]) -> Loaded:
    with torch.random.fork_rng(devices=()), _missing_weights() as missing:
        model = load().model
    owners = dict(_parts(model.latent_format, model.diffusion_model))
    parts = {path: _part(owner) for path, owner in owners.items()}
    weights = {name: weight for name, weight in _weights(owners, parts) if name not in missing}
    return Loaded(
        parts=parts,
        samples={name: _widened(sample(weight)) for name, weight in weights.items()},
        shapes={name: weight.shape for name, weight in weights.items()},
    )


@contextmanager
def _missing_weights() -> Iterator[set[str]]:
    """Collects the names of weights that a network loaded in this context has, and its file has not."""
    missing: set[str] = set()
    load_weights = BaseModel.load_model_weights

    def load(self: BaseModel, *args: Any, **kwargs: Any) -> BaseModel:
        def note(_: nn.Module, keys: Any) -> None:
            missing.update(f"{NETWORK}.{key}" for key in keys.missing_keys)

        with self.diffusion_model.register_load_state_dict_post_hook(note):
            return load_weights(self, *args, **kwargs)

    BaseModel.load_model_weights = load
    try:
        yield missing
    finally:
        BaseModel.load_model_weights = load_weights


def parts_of(latent_format: Any, network: nn.Module) -> dict[str, KnownPart]:
    return {path: _part(owner) for path, owner in _parts(latent_format, network)}


def _parts(latent_format: Any, network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the LatentFormat, all modules of the network, and ComfyUI's own objects that are their attributes."""
    yield LATENT_FORMAT, latent_format
    for path, module in network.named_modules(prefix=NETWORK):
        yield path, module
        values = vars(module)
        kinds: set[Any] = {*map(type, values.values())}  # a few, which are quicker to look at than all values
        if own := {*filter(_has_attributes, kinds)}:
            yield from ((f"{path}.{name}", value) for name, value in values.items() if type(value) in own)


@functools.cache
def _has_attributes(kind: type) -> bool:
    return is_comfyui(kind) and not issubclass(kind, nn.Module | Tensor) and hasattr(kind, "__dict__")


def _part(owner: Any) -> KnownPart:
    own = {name: value for name, value in vars(owner).items() if not _is_bookkeeping(name)}
    return KnownPart(
        kind=_kind_of(owner),
        names=frozenset(_all_attributes(owner)),
        code=frozenset(code_on(owner)),
        values={name: value for name, value in own.items() if _is_plain(value)},
        tensors=tuple(name for name, value in own.items() if isinstance(value, Tensor)),
    )


def _all_attributes(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object, and a module's parameters, buffers and children among them."""
    values = vars(owner)
    registered = (values.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
    return {**values, **{name: value for each in registered for name, value in each.items()}}


_class_name: Callable[[type], str] = functools.cache(qualified_name)


def _kind_of(owner: Any) -> str:
    return _class_name(type(owner))


def _is_plain(value: Any) -> bool:
    """Is this a plain value, or a list or the like of such? An empty one may be a cache."""
    if isinstance(value, list | tuple | set | frozenset):
        return bool(value) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return bool(value) and all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, PLAIN)


@functools.cache
def _is_bookkeeping(name: str) -> bool:
    """Is this an attribute that loading or computing sets?"""
    own = name in vars(comfy.ops.CastWeightBiasOp) or name.startswith(("comfy_", "prev_comfy_"))
    return own or name == "training" or name.endswith(CACHED)


def _check_modules(parts: dict[str, Any], loaded: Loaded, path: str) -> None:
    for name, part in loaded.parts.items():
        inside = name.rpartition(".")[0]
        if name not in parts and is_in_a_pack(kind := type(parts.get(inside))):
            raise Refused("network.changed", what=inside.removeprefix(f"{NETWORK}."), code=name_in_pack(kind))
        if name not in parts or not (_kind_of(parts[name]) == part.kind or is_in_a_pack(type(parts[name]))):
            found = _kind_of(parts[name]) if name in parts else quoted(None)
            _refuse(name, found, part.kind, path)
    for name in parts.keys() - loaded.parts.keys():
        if isinstance(parts.get(name.rpartition(".")[0]), CONTAINERS):
            _refuse(name, _kind_of(parts[name]), quoted(None), path)


def _equal(found: Any, value: Any) -> bool:
    """Are these plain values equal? A tuple equals a list of the same values: who reads them is given the same."""
    if isinstance(found, list | tuple) and isinstance(value, list | tuple):
        return len(found) == len(value) and all(map(_equal, found, value))
    return bool(found == value)


def _changed_values(
    parts: dict[str, Any], model: ModelPatcher, before: dict[str, KnownPart]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yields the names of plain attributes that differ, with the value found and that `before`. What an object patch of
    some MODEL has replaced is as it was before."""
    for path, part in before.items():
        now = vars(parts[path])
        expected = part.values
        if more := [name for name in now.keys() - part.names if not _is_bookkeeping(name)]:
            of_class = ((name, getattr(type(parts[path]), name, None)) for name in more)
            expected = expected | {name: one for name, one in of_class if _is_plain(one) and one is not None}
        for name, value in expected.items():
            found = now.get(name, Ellipsis)
            if found is not value and (found is Ellipsis or _is_plain(found)) and not _equal(found, value):
                found = model.object_patches_backup.get(f"{path}.{name}", found)
                if not _equal(found, value):
                    yield f"{path}.{name}", (found, value)


def _check_weights(parts: dict[str, Any], model: ModelPatcher, loaded: Loaded, path: str) -> None:
    """Raises Refused for a weight without patches whose samples are not the file's, rounded to its dtype."""
    groups: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}  # by device
    for name, weight in _weights(parts, loaded.parts, model):
        found_shape, shape = weight.shape, loaded.shapes.get(name)
        if shape == found_shape:
            if not weight.is_meta:
                groups.setdefault((weight.get_device(), weight.dtype), {})[name] = sample(weight)
        elif shape is not None and isinstance(weight, nn.Parameter):
            _refuse(name, str(tuple(found_shape)), str(tuple(shape)), path)
    for (_, dtype), samples in groups.items():
        found = _widened(torch.cat([*samples.values()]).cpu())
        expected = _widened(torch.cat([loaded.samples[name] for name in samples]).to(dtype))
        if not (found.equal(expected) or torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)):
            sizes = [len(values) for values in samples.values()]
            each = zip(samples, found.split(sizes), expected.split(sizes), strict=True)
            names = [name for name, a, b in each if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)]
            first = names[0].removeprefix(f"{NETWORK}.")
            raise Refused("network.weights", name=first, count=len(names), path=path)


def _weights(
    parts: dict[str, Any], known: dict[str, KnownPart], model: ModelPatcher | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters, buffers and other tensors of the `known` parts, without the patches of `model`."""
    backup = {} if model is None else {name: kept.weight for name, kept in model.backup.items()}
    backup |= {} if model is None else {name: weight for name, (weight, _) in model.hook_backup.items()}
    for path, part in known.items():
        owner = parts[path]
        tensors = {name: vars(owner).get(name) for name in part.tensors}
        if isinstance(owner, nn.Module):
            tensors |= owner._parameters | owner._buffers
        for name, tensor in tensors.items():
            if tensor is None or name.endswith(CACHED):
                continue
            key = f"{path}.{name}"
            tensor = backup.get(key, tensor)
            if type(tensor) not in WEIGHT_TYPES:
                tensor = getattr(tensor, "_qdata", None)  # of ComfyUI's quantised weights
            if type(tensor) in WEIGHT_TYPES:
                yield key, tensor


def _widened(samples: Tensor) -> Tensor:
    """Returns the same numbers in a dtype that has all operations."""
    return samples.double() if samples.dtype.itemsize > 4 or samples.dtype == torch.int32 else samples.float()


@dataclass(frozen=True)
class NodeCall:
    """A node of the prompt that ran, its inputs (values or links), and the network as it put it into a model."""

    node: str
    inputs: dict[str, Any]
    made: dict[str, KnownPart]


_calls: MutableMapping[Any, NodeCall] = WeakIdKeyDictionary()  # by ComfyUI's model around the network


def note_loaders() -> None:
    """Has torch tell us of networks from now on."""
    register_module_module_registration_hook(_note)


def _note(owner: nn.Module, name: str, network: nn.Module | None) -> None:
    is_model = name == NETWORK and isinstance(owner, BaseModel) and "latent_format" in vars(owner)
    if not is_model or network is None or (running := get_executing_context()) is None:
        return
    with suppress(NodeNotFoundError):  # a pack may run a prompt of its own
        node = get_progress_state().dynprompt.get_node(running.node_id)
        made = parts_of(owner.latent_format, network)
        _calls[owner] = NodeCall(node["class_type"], dict(node["inputs"]), made)


def note_call(model: BaseModel, node: str, inputs: dict[str, Any]) -> None:
    """Has workers call this node for the MODEL that it has just made."""
    _calls[model] = NodeCall(node, inputs, parts_of(model.latent_format, model.diffusion_model))


def spec_by_node(model: ModelPatcher) -> ModelSpec:
    """Returns the call of the node with which workers load this MODEL, and plain attributes that have changed since.
    Raises Refused, by the node's name, where they cannot call it."""
    call = _calls.get(model.model)
    if call is None:
        raise Refused("model.nameless", kind=qualified_name(type(model)))
    for name, value in call.inputs.items():
        if is_link(value):
            raise Refused("loader.linked", node=call.node, name=name)
    try:
        loader = reference(NODE_CLASS_MAPPINGS[call.node], f"the loader {call.node}")
    except Unsendable as unsendable:
        raise Refused("loader.foreign", reason=unsendable.sentence) from None
    folders = {name: list(paths) for name, (paths, *_) in folder_paths.folder_names_and_paths.items()}
    files = {folder_paths.get_full_path(folder, text) for text in call.inputs.values() if isinstance(text, str)
             for folder in folders}  # fmt: skip
    arguments = {"inputs": call.inputs, "folders": folders, "pack_files": files_of(packs_named(loader))}
    return ModelSpec(
        loader=loader,
        arguments=json.dumps(arguments, sort_keys=True),
        files=tuple(stat_file(path) for path in sorted(filter(None, files))),
        weight_dtype=str(model.model.get_dtype()).removeprefix("torch."),
        dynamic_vram=model.is_dynamic(),
        attributes=changed_since_made(model, call.made, call.node),
        weights_fingerprint=network_fingerprint(model),
    )
