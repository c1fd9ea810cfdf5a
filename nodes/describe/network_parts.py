"""The parts of a network, its modules and ComfyUI's plain objects in them, and whether they are what the network's file
or node gives, since nodes may have changed it in place.

The file is loaded once more, as CP Load Diffusion Model does it, when a MODEL is first seen: its weights stay views of
the mapped file, of which samples are read. Plain values that differ are sent; all else that differs is refused."""

import functools
import json
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import comfy.ops
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_runtime.errors import Refused, quoted
from ...parallel_runtime.loading import code_names, fingerprint, mapped, object_codec, pack_states
from ...parallel_runtime.loading.replaced_code import is_in_a_pack, name_in_pack
from .foreign_code import NETWORK, code_on
from .model_patches import native_model, native_network, without_compiled

LATENT_FORMAT = "latent_format"
CACHED = "_cached"  # ends the names of what a forward keeps for longer sequences
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # whose modules run because they are there
WEIGHT_TYPES = (Tensor, nn.Parameter)  # of weights that are compared


@dataclass(frozen=True, kw_only=True)
class KnownPart:
    """A module, or a plain object of ComfyUI's in one: its class, and the names of its attributes and children, of them
    those that are plain with their values, and those that are tensors."""

    kind: str
    names: frozenset[str]
    code: frozenset[str]  # those with code of packs
    values: dict[str, Any]
    tensors: tuple[str, ...]


def parts_of(latent_format: Any, network: nn.Module) -> dict[str, KnownPart]:
    """Returns the parts of a network and its LatentFormat as they are now, by path."""
    known = {}
    for path, owner in named_parts(latent_format, network):
        own = {name: value for name, value in vars(owner).items() if not is_bookkeeping(name)}
        known[path] = KnownPart(
            kind=kind_of(owner),
            names=frozenset(all_attributes(owner)),
            code=frozenset(code_on(owner)),
            values={name: value for name, value in own.items() if is_plain(value)},
            tensors=tuple(name for name, value in own.items() if isinstance(value, Tensor)),
        )
    return known


def named_parts(latent_format: Any, network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields by path a LatentFormat and the parts of its network."""
    yield LATENT_FORMAT, latent_format
    yield from parts_within(network, NETWORK)


def parts_within(network: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields all modules of a network, and ComfyUI's own objects that are their attributes."""
    for path, module in network.named_modules(prefix=prefix):
        yield path, module
        values = vars(module)
        kinds: set[Any] = {*map(type, values.values())}  # a few, which are quicker to look at than all values
        if own := {*filter(_has_attributes, kinds)}:
            yield from ((f"{path}.{name}", value) for name, value in values.items() if type(value) in own)


@functools.cache
def _has_attributes(kind: type) -> bool:
    return code_names.is_comfyui(kind) and not issubclass(kind, nn.Module | Tensor) and hasattr(kind, "__dict__")


def all_attributes(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object, and a module's parameters, buffers and children among them."""
    values = vars(owner)
    registered = (values.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
    return {**values, **{name: value for each in registered for name, value in each.items()}}


_class_name: Callable[[type], str] = functools.cache(code_names.qualified_name)


def kind_of(owner: Any) -> str:
    """Returns the name of the object's class."""
    return _class_name(type(owner))


def is_plain(value: Any) -> bool:
    """Is this a plain value, or a list or the like of such? An empty one may be a cache."""
    if isinstance(value, list | tuple | set | frozenset):
        return bool(value) and all(map(is_plain, value))
    if isinstance(value, dict):
        return bool(value) and all(map(is_plain, (*value, *value.values())))
    return isinstance(value, object_codec.PLAIN)


@functools.cache
def is_bookkeeping(name: str) -> bool:
    """Is this an attribute that loading or computing sets?"""
    own = name in vars(comfy.ops.CastWeightBiasOp) or name.startswith(("comfy_", "prev_comfy_"))
    return own or name == "training" or name.endswith(CACHED)


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a file gives: by path the parts of the network and its LatentFormat, by name samples of the weights and the
    weights' shapes. Weights that are not in the file are left out."""

    parts: dict[str, KnownPart]
    samples: dict[str, Tensor]
    shapes: dict[str, torch.Size]


_loaded: WeakKeyDictionary[nn.Module, Loaded] = WeakKeyDictionary()  # by the network that was compared with it
made_by_node: MutableMapping[Any, dict[str, KnownPart]] = WeakIdKeyDictionary()  # the parts of a network, by its model


@torch.no_grad()
def changed_attributes(model: ModelPatcher, path: str, load: Callable[[], mapped.Mapped]) -> str:
    """Returns the plain attributes that are not those of a network that `load` gives from the file at `path`: JSON for
    ModelSpec. Raises Refused for weights, modules and other values that are not."""
    model = native_model(model)
    network = native_network(model)
    loaded = _loaded.get(network)
    if loaded is None:
        with torch.random.fork_rng(devices=()), _missing_weights() as missing:
            again = load().model
        known = parts_of(again.latent_format, again.diffusion_model)
        owners = dict(named_parts(again.latent_format, again.diffusion_model))
        weights = {name: weight for name, weight in _weights(owners, known) if name not in missing}
        samples = {name: _widened(fingerprint.sample(weight)) for name, weight in weights.items()}
        loaded = Loaded(known, samples, {name: weight.shape for name, weight in weights.items()})
    parts = _unpatched_parts(model)
    _check_modules(parts, loaded, path)
    _check_weights(parts, model, loaded, path)
    _loaded[network] = loaded  # not before: the file may have been replaced, and put back later
    return _plain_changes(parts, model, loaded.parts, path)


def changed_since_made(model: ModelPatcher, node: str) -> str:
    """Returns as `changed_attributes` what plain attributes are not as they were when this node put the network into
    its model. Workers compare its layers and weights."""
    parts = dict(named_parts(model.model.latent_format, model.model.diffusion_model))
    before = {}
    for name, part in made_by_node[model.model].items():
        if name in parts and kind_of(parts[name]) == part.kind:
            now = vars(parts[name])  # a loader may put a weight where None was
            before[name] = replace(part, values={key: part.values[key] for key in part.values if key in now})
    return _plain_changes(parts, model, before, node)


def code_in_place(model: ModelPatcher) -> dict[str, Any]:
    """Returns by name what nodes have put onto parts of MODEL's network, without object patches: functions, methods and
    classes of packs, and what else these name of attributes that the parts did not have when they were loaded."""
    model = native_model(model)
    parts, loaded = _unpatched_parts(model), _loaded.get(native_network(model))
    before = made_by_node[model.model] if loaded is None else loaded.parts
    known = {path: part for path, part in before.items() if path.startswith(NETWORK) and path in parts}
    found: dict[str, Any] = {}
    for path, part in known.items():
        if is_in_a_pack(kind := type(parts[path])) and kind_of(parts[path]) != part.kind:
            found[f"{path}.__class__"] = kind
        on_part = code_on(parts[path], model.object_patches.get(f"{path}.__class__"))
        found |= {f"{path}.{name}": one for name, one in on_part.items() if name not in part.code}
    found = {name: one for name, one in found.items() if name not in model.object_patches_backup}
    code = [*found.values(), *without_compiled(model).values()]
    is_read = pack_states.reads(pack_states.reached(code))
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


def _plain_changes(parts: dict[str, Any], model: ModelPatcher, before: dict[str, KnownPart], path: str) -> str:
    """Returns the plain attributes that differ from those `before`, as JSON. What an object patch of some MODEL has
    replaced is as it was before. Raises Refused for values that are not plain."""
    changed = {}
    for place, part in before.items():
        now, expected = vars(parts[place]), dict(part.values)
        for name in now.keys() - part.names:
            of_class = None if is_bookkeeping(name) else getattr(type(parts[place]), name, None)
            if of_class is not None and is_plain(of_class):
                expected[name] = of_class
        for name, value in expected.items():
            found = now.get(name, Ellipsis)
            if found is value or (found is not Ellipsis and not is_plain(found)) or _equal(found, value):
                continue
            name = f"{place}.{name}"
            found = model.object_patches_backup.get(name, found)
            if not _equal(found, value):
                if not isinstance(found, object_codec.PLAIN) or not isinstance(value, object_codec.PLAIN):
                    _refuse(name, quoted(found), quoted(value), path)
                changed[name] = found
    return json.dumps(changed) if changed else ""


def _refuse(name: str, found: str, expected: str, path: str) -> None:
    raise Refused("network.edited", name=name.removeprefix(f"{NETWORK}."), found=found, expected=expected, path=path)


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


def _check_weights(parts: dict[str, Any], model: ModelPatcher, loaded: Loaded, path: str) -> None:
    """Raises Refused for a weight without patches whose samples are not the file's, rounded to its dtype."""
    groups: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}  # by device
    for name, weight in _weights(parts, loaded.parts, model):
        found_shape, shape = weight.shape, loaded.shapes.get(name)
        if shape == found_shape:
            if not weight.is_meta:
                groups.setdefault((weight.get_device(), weight.dtype), {})[name] = fingerprint.sample(weight)
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
