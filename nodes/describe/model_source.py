"""Where a MODEL comes from: whether its network is what its file gives, since nodes may have changed it in place; and,
where it names no file, the node that has made it.

The file is loaded once more, as CP Load Diffusion Model does it, when a MODEL is first seen: its weights stay views of
the mapped file, of which samples are read. Plain values that differ are sent; all else that differs is refused.

torch tells us of each network that is put into a model, ComfyUI of each other model that gets a ModelPatcher, such as
a CLIP's text encoder, and which node of which prompt runs at that moment. Workers call that node with the same inputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

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
    packs_named,
    qualified_name,
    reference,
)
from ...parallel_runtime.loading.fingerprint import sample, stat_file
from ...parallel_runtime.loading.mapped import Mapped, kept_dtypes, network_fingerprint
from ...parallel_runtime.loading.object_codec import PLAIN
from ...parallel_runtime.loading.pack_states import reached, reads
from ...parallel_runtime.loading.replaced_code import is_in_a_pack, name_in_pack
from ...parallel_runtime.specs import ModelSpec
from .foreign_code import code_on
from .model_patches import native_model, native_network, without_compiled
from .network_parts import (
    CACHED,
    NETWORK,
    KnownPart,
    all_attributes,
    is_bookkeeping,
    is_plain,
    kind_of,
    named_parts,
    parts_of,
    parts_within,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # whose modules run because they are there
WEIGHT_TYPES = (Tensor, nn.Parameter)  # of weights that are compared


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
    network = native_network(model)
    loaded, parts = _loaded.get(network) or _load(load), _unpatched_parts(model)
    _check_modules(parts, loaded, path)
    _check_weights(parts, model, loaded, path)
    _loaded[network] = loaded  # not before: the file may have been replaced, and put back later
    return _plain_changes(parts, model, loaded.parts, path)


def changed_since_made(model: ModelPatcher, made: dict[str, KnownPart], path: str) -> str:
    """Returns as `changed_attributes` what plain attributes are not as `made`, `parts_of` a network as a node put it
    into its model. Workers compare its layers and weights."""
    parts = dict(named_parts(model.model.latent_format, model.model.diffusion_model))
    before = {}
    for name, part in made.items():
        if name in parts and kind_of(parts[name]) == part.kind:
            now = vars(parts[name])  # a loader may put a weight where None was
            before[name] = replace(part, values={key: part.values[key] for key in part.values if key in now})
    return _plain_changes(parts, model, before, path)


def code_in_place(model: ModelPatcher) -> dict[str, Any]:
    """Returns by name what nodes have put onto parts of MODEL's network, without object patches: functions, methods and
    classes of packs, and what else these name of attributes that the parts did not have when they were loaded."""
    model = native_model(model)
    parts, loaded = _unpatched_parts(model), known_parts(model)
    known = {path: part for path, part in loaded.items() if path.startswith(NETWORK) and path in parts}
    found: dict[str, Any] = {}
    for path, part in known.items():
        if is_in_a_pack(kind := type(parts[path])) and kind_of(parts[path]) != part.kind:
            found[f"{path}.__class__"] = kind
        on_part = code_on(parts[path], model.object_patches.get(f"{path}.__class__"))
        found |= {f"{path}.{name}": one for name, one in on_part.items() if name not in part.code}
    found = {name: one for name, one in found.items() if name not in model.object_patches_backup}
    code = [*found.values(), *without_compiled(model).values()]
    is_read = reads(reached(code))
    for path, part in known.items() if code else ():
        for name, value in all_attributes(parts[path]).items():
            if is_read(name) and name not in part.names and not is_bookkeeping(name):
                found[f"{path}.{name}"] = value
    return found


def _unpatched_parts(model: ModelPatcher) -> dict[str, Any]:
    """Returns the parts of MODEL's network as they are without the MODEL that ComfyUI has loaded now."""
    parts = dict(named_parts(model.model.latent_format, native_network(model)))
    for name, before in model.object_patches_backup.items():
        if isinstance(before, nn.Module):
            parts = {path: part for path, part in parts.items() if not path.startswith(f"{name}.")}
            parts |= dict(parts_within(before, name))
    return parts


def known_parts(model: ModelPatcher) -> dict[str, KnownPart]:
    """Returns the parts of MODEL's network as they were loaded, once it has been compared with its file or node."""
    loaded = _loaded.get(native_network(model))
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
    owners = dict(named_parts(model.latent_format, model.diffusion_model))
    parts = parts_of(model.latent_format, model.diffusion_model)
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


def _check_modules(parts: dict[str, Any], loaded: Loaded, path: str) -> None:
    for name, part in loaded.parts.items():
        inside = name.rpartition(".")[0]
        if name not in parts and is_in_a_pack(kind := type(parts.get(inside))):
            raise Refused("network.changed", what=inside.removeprefix(f"{NETWORK}."), code=name_in_pack(kind))
        if name not in parts or not (kind_of(parts[name]) == part.kind or is_in_a_pack(type(parts[name]))):
            found = kind_of(parts[name]) if name in parts else quoted(None)
            _refuse(name, found, part.kind, path)
    for name in parts.keys() - loaded.parts.keys():
        if isinstance(parts.get(name.rpartition(".")[0]), CONTAINERS):
            _refuse(name, kind_of(parts[name]), quoted(None), path)


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
        if more := [name for name in now.keys() - part.names if not is_bookkeeping(name)]:
            of_class = ((name, getattr(type(parts[path]), name, None)) for name in more)
            expected = expected | {name: one for name, one in of_class if is_plain(one) and one is not None}
        for name, value in expected.items():
            found = now.get(name, Ellipsis)
            if found is not value and (found is Ellipsis or is_plain(found)) and not _equal(found, value):
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
    """A node of the prompt that ran, its inputs (values or links), and the network that it put into a model, if any."""

    node: str
    inputs: dict[str, Any]
    made: dict[str, KnownPart]


_calls: MutableMapping[Any, NodeCall] = WeakIdKeyDictionary()  # by the model in a ModelPatcher


def note_loaders() -> None:
    """Has torch tell us of networks, and ComfyUI of ModelPatchers, from now on."""
    register_module_module_registration_hook(_note)
    begin = ModelPatcher.__init__

    @functools.wraps(begin)
    def noting(patcher: ModelPatcher, model: Any, *args: Any, **kwargs: Any) -> None:
        begin(patcher, model, *args, **kwargs)
        if isinstance(model, nn.Module) and not isinstance(model, BaseModel) and not is_noted(model):
            _note_running(model, {})

    ModelPatcher.__init__ = noting


def _note(owner: nn.Module, name: str, network: nn.Module | None) -> None:
    is_model = name == NETWORK and isinstance(owner, BaseModel) and "latent_format" in vars(owner)
    if is_model and network is not None and get_executing_context() is not None:
        _note_running(owner, parts_of(owner.latent_format, network))


def _note_running(model: nn.Module, made: dict[str, KnownPart]) -> None:
    """Notes the node that runs at this moment, if one does, as that which makes the model."""
    if (running := get_executing_context()) is None:
        return
    with suppress(NodeNotFoundError):  # a pack may run a prompt of its own
        node = get_progress_state().dynprompt.get_node(running.node_id)
        _calls[model] = NodeCall(node["class_type"], dict(node["inputs"]), made)


def is_noted(model: nn.Module) -> bool:
    """Is it known which node has made this model?"""
    return model in _calls


def note_call(model: BaseModel, node: str, inputs: dict[str, Any]) -> None:
    """Has workers call this node for the MODEL that it has just made."""
    _calls[model] = NodeCall(node, inputs, parts_of(model.latent_format, model.diffusion_model))


def spec_by_node(model: ModelPatcher) -> ModelSpec:
    """Returns the call of the node with which workers load this MODEL, and plain attributes of it that have changed
    since; or a CLIP's text encoder. Raises Refused, by the node's name, where they cannot call it."""
    call = _calls.get(model.model)
    if call is None:
        raise Refused("model.nameless", kind=qualified_name(type(model)))
    is_network = isinstance(model.model, BaseModel)
    kind = "MODEL" if is_network else "CLIP"
    for name, value in call.inputs.items():
        if is_link(value):
            raise Refused("loader.linked", kind=kind, node=call.node, name=name)
    try:
        loader = reference(NODE_CLASS_MAPPINGS[call.node], f"the loader {call.node}")
    except Unsendable as unsendable:
        if not is_network:
            raise
        raise Refused("loader.foreign", reason=unsendable.sentence) from None
    folders = {name: list(paths) for name, (paths, *_) in folder_paths.folder_names_and_paths.items()}
    files = {folder_paths.get_full_path(folder, text) for text in call.inputs.values() if isinstance(text, str)
             for folder in folders}  # fmt: skip
    arguments = {
        "inputs": call.inputs,
        "folders": folders,
        "pack_files": files_of(packs_named(loader)),
        "kept": kept_dtypes(model),
    }
    spec = ModelSpec(
        loader=loader,
        arguments=json.dumps(arguments, sort_keys=True),
        files=tuple(stat_file(path) for path in sorted(filter(None, files))),
        dynamic_vram=model.is_dynamic(),
        weights_fingerprint=network_fingerprint(model),
        text_encoder=not is_network,
    )
    if not is_network:
        return spec
    dtype, attributes = model.model.get_dtype(), changed_since_made(model, call.made, call.node)
    return replace(spec, weight_dtype=str(dtype).removeprefix("torch."), attributes=attributes)
