"""The kinds of values that workers get: for each a row of KINDS, with what is sent of one and what makes it again.
Those of models are rows of MODEL_KINDS in object_codec.py.

Only names of code and plain values travel, beside tensors, never code; names outside of ComfyUI are refused
(code_names.py), and nothing is evaluated."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from inspect import ismemberdescriptor
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import comfy.ldm.modules.attention
import numpy
import torch
from comfy.model_management import cast_to_device, get_torch_device
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ..errors import Refused
from ..wire.bundles import check_tensor
from . import code_names
from .code_names import Unsendable
from .fingerprint import code_fingerprint
from .random_states import STATES, describe_generator, rebuild_generator, set_state, state_of

if TYPE_CHECKING:
    from .object_codec import Parts, Rebuilder

# Each run sets these attributes of objects and variables of functions before it reads them.
SET_BY_EACH_RUN = {
    "comfy.context_windows:IndexListContextHandler": ("_model",),
    "comfy_extras.nodes_sparse_attention:SparseAttnPatch": ("installed", "pooled", "vsa_plans", "vsa_rope", "_logged"),
    "comfy_extras.nodes_tomesd:TomePatchModel.execute.<locals>.tomesd_m": ("u",),
    "comfy_extras.nodes_tomesd:TomePatchModel.execute.<locals>.tomesd_u": ("u",),
}
# ComfyUI's functions that refer to the block which they replace, and leave it to a plan's `head_producers`.
OF_BLOCKS = (
    "comfy_extras.nodes_sparse_attention:make_h3_block_patch.<locals>.block_patch",
    "comfy_extras.nodes_sparse_attention:make_h3_block_patch.<locals>.attention",
)
DECORATORS: dict[str, Callable[..., Any]] = {  # by which packs make attention functions
    "wrap_attn": comfy.ldm.modules.attention.wrap_attn,
    "disable": torch.compiler.disable,
}
PACKAGES = ("comfy.", "comfy_extras.")
BASES = ("abc", "typing", "contextlib", "torch.autograd.grad_mode", "torch.utils._contextlib")  # of classes of objects
NAMESPACES = (math, torch, torch.nn.functional)  # modules whose functions in C are known by name
MODULES = (*NAMESPACES, numpy)
DICTS = {kind.__name__: kind for kind in (dict, OrderedDict, defaultdict)}
SETS = {kind.__name__: kind for kind in (set, frozenset)}
MISSING = object()  # a variable that is gone
TYPES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set, frozenset, object)}
Node = dict[str, Any]  # the description of one value: its kind, and what that kind's row says
_tensor_numbers = itertools.count()  # of this process: tensors of several descriptions may lie in one bundle


@dataclass(frozen=True)
class Kind:
    """A kind of values: which ones, what is sent of one, and what makes it again. `describe` calls `to` for each part,
    and `rebuild` calls `make` for what that has returned, in the same order."""

    fits: Callable[[Any], bool]
    describe: Callable[[Any, Parts], Node]
    rebuild: Callable[[Node, Rebuilder], Any]


def of_types(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def exactly(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _describe_tensor(value: Tensor, to: Parts) -> Node:
    if value.is_meta:
        raise Refused("unsendable.weight", what=to.what)
    try:
        check_tensor(value, to.what)
    except Refused as why:
        thing = code_names.qualified_name(type(value))
        raise Unsendable("unsendable.object.because", what=to.what, thing=thing, reason=why.sentence) from None
    name = f"described {next(_tensor_numbers)}"
    to.describer.tensors[name] = value
    return {"name": name, "on_cpu": value.device.type == "cpu"}


def _rebuild_device(node: Node, _: Rebuilder) -> torch.device:
    return torch.device("cpu") if node["on_cpu"] else get_torch_device()


def _has_conversion(value: Any) -> bool:
    """Is this a weight of a merged model, with the method of its layer of ComfyUI's that dequantizes it?"""
    if type(value) is not tuple or len(value) != 2 or not isinstance(value[1], MethodType):
        return False
    weight, method = value
    return isinstance(weight, Tensor) and code_names.is_comfyui(method) and method.__name__.startswith("convert_")


def _describe_merged(value: tuple[Tensor, MethodType], to: Parts) -> Node:
    """Describes the weight alone, since no layer can be sent. It is dequantized as ComfyUI does that to merge it."""
    weight, convert = value
    if type(weight.data) is not Tensor or weight.itemsize == 1:
        weight = convert(cast_to_device(weight, weight.device, torch.float32, copy=True), inplace=True)
    return {"of": to(weight)}


def _rebuild_merged(node: Node, make: Rebuilder) -> tuple[Tensor, Callable[..., Any]]:
    """Makes the pair again with the function that ComfyUI has beside a merged weight whose layer converts nothing."""
    cpu = torch.device("cpu")
    convert: Callable[..., Any] = ModelPatcher(nn.Linear(1, 1), cpu, cpu).get_key_patches()["weight"][0][1]
    return make(node["of"]), convert


def _describe_method(method: MethodType, to: Parts) -> Node:
    owner = method.__self__ if isinstance(method.__self__, type) else type(method.__self__)
    name = getattr(method, "__name__", "")  # a partial has none
    own = getattr(owner, name, None)
    if getattr(own, "__func__", own) is method.__func__:
        return {"of": to(method.__self__), "name": name}
    return {"of": to(method.__self__), "function": to(method.__func__)}


def _rebuild_method(node: Node, make: Rebuilder) -> Any:
    of = make(node["of"])
    if "function" in node:
        return MethodType(make(node["function"]), of)
    # Not the object's own, which may be a patch of the last run.
    method = getattr(of, node["name"]) if isinstance(of, type) else getattr(type(of), node["name"]).__get__(of)
    if not isinstance(method, MethodType):
        raise Refused("worker.reference", name=node["name"])
    return method


def _describe_function(function: FunctionType, to: Parts) -> Node:
    """Describes a function that another one has made: by its code, since functools.wraps gives it another's name."""
    home, thing, code = code_names.home_of(function), code_names.qualified_name(function), function.__code__
    name = f"{code_names.module_reference(home, to.what, thing)}:{code.co_qualname}"
    try:  # workers have to find this code under that name
        code_names.code_named(name, code_fingerprint(code))
    except Refused:
        raise Unsendable("unsendable.foreign", what=to.what, thing=thing) from None
    if vars(sys.modules[home]) is not function.__globals__:
        raise Unsendable("unsendable.foreign", what=to.what, thing=thing)
    left_out = ("__wrapped__",) if name.startswith(PACKAGES) else ()
    to = replace(to, what=f"{to.what} {thing}")
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    to.describer.emptied.update(id(cells[variable]) for variable in SET_BY_EACH_RUN.get(name, ()))
    names_network = to.describer.names_network
    described = to.each(cells.values())
    if name in OF_BLOCKS:
        to.describer.names_network = names_network
    return {
        "name": name,
        "code": code_fingerprint(code),
        "cells": described,
        "defaults": to(function.__defaults__),
        "keyword_defaults": to(function.__kwdefaults__),
        "attributes": to({name: value for name, value in vars(function).items() if name not in left_out}),
    }


def _rebuild_function(node: Node, make: Rebuilder) -> FunctionType:
    code, (module, _, path) = code_names.code_named(node["name"], node["code"]), node["name"].partition(":")
    cells, defaults = make(node["cells"]), make(node["defaults"])
    made = FunctionType(code, vars(code_names.module_named(module)), argdefs=defaults, closure=tuple(cells))
    made.__qualname__, made.__module__ = path, code_names.module_named(module).__name__
    made.__kwdefaults__ = make(node["keyword_defaults"])
    vars(made).update(make(node["attributes"]))
    return made


def _decorator(value: Any) -> str:
    """Names the one of DECORATORS that has made this function of another one, its `__wrapped__`; "" for others."""
    # What they make refers to itself, or is torch's.
    if not isinstance(value, FunctionType) or not hasattr(value, "__wrapped__"):
        return ""
    if value.__globals__ is vars(comfy.ldm.modules.attention):
        return "wrap_attn" if value.__code__.co_name == "wrapper" else ""
    return "disable" if getattr(value, "_torchdynamo_disable", False) else ""


def _describe_cell(cell: CellType, to: Parts) -> Node:
    """Describes a closure's variable, which several functions may share. Nothing may be assigned to it yet."""
    if cell == CellType():
        return {}
    return {"of": None if id(cell) in to.describer.emptied else to(cell.cell_contents)}


def _describe_object(value: Any, to: Parts) -> Node:
    kind = type(value)
    bases = (base for base in kind.__mro__ if not (code_names.is_comfyui(base) or code_names.is_of_a_pack(base)))
    if any(base.__module__ not in BASES for base in bases if base is not object):
        raise Unsendable("unsendable.object", what=to.what, thing=code_names.qualified_name(kind))
    name = code_names.reference(kind, to.what)
    parts = attributes_of(value)
    for key in SET_BY_EACH_RUN.get(name, ()):
        if key in parts:
            parts[key] = type(parts[key])() if isinstance(parts[key], dict | list | set) else None
    return {"class": name, "attributes": to(parts)}


def _rebuild_object(node: Node, make: Rebuilder) -> Any:
    made = object.__new__(code_names.named(node["class"]))  # a pack's own `__new__` may want arguments
    set_attributes(made, make(node["attributes"]))
    return made


def _slots(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name, part in vars(base).items() if ismemberdescriptor(part)]


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object itself, those in `__slots__` too; of a random generator its state, of a
    closure's variable what is assigned to it."""
    if isinstance(value, CellType):
        return {} if value == CellType() else {"cell_contents": value.cell_contents}
    if type(value) in STATES:
        return {"state": state_of(value)}
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Gives an object these attributes, and no others. A class may refuse to have them set (a frozen dataclass)."""
    if type(value) in STATES:
        set_state(value, attributes["state"])
        return
    if isinstance(value, CellType):
        value.cell_contents = attributes.get("cell_contents")
        return
    slots = _slots(type(value))
    for name in slots:
        if name in attributes:
            object.__setattr__(value, name, attributes[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)
    if hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update({name: part for name, part in attributes.items() if name not in slots})


def _describe_dict(value: dict[Any, Any], to: Parts) -> Node:
    node = {"type": type(value).__name__, "items": [to.each(item) for item in value.items()]}
    return {**node, "factory": to(value.default_factory)} if isinstance(value, defaultdict) else node


def _rebuild_dict(node: Node, make: Rebuilder) -> dict[Any, Any]:
    items = make(node["items"])
    return defaultdict(make(node["factory"]), items) if "factory" in node else DICTS[node["type"]](items)


def _is_named(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return code_names.attribute(sys.modules.get(value.__module__), value.__qualname__) is value
    return isinstance(value, type)


def _namespace_of(value: Any) -> ModuleType | None:
    """Returns the module that has this function of C under its name."""
    return next((module for module in NAMESPACES if getattr(module, value.__name__, None) is value), None)


def _builtin_named(module: str, name: str) -> Any:
    value = getattr(_module_of_value(module), name)
    if not isinstance(value, BuiltinFunctionType):
        raise Refused("worker.reference", name=f"{module}:{name}")
    return value


def _module_value(module: ModuleType, what: str) -> str:
    known = next((one.__name__ for one in MODULES if one is module), None)
    return known or code_names.module_reference(module.__name__, what, f"the module {module.__name__}")


def _module_of_value(name: str) -> ModuleType:
    return next((one for one in MODULES if one.__name__ == name), None) or code_names.module_named(name)


KINDS = {  # a value is of the first kind that fits
    "list": Kind(exactly(list), lambda value, to: {"items": to.each(value)}, lambda node, make: make(node["items"])),
    "merged": Kind(_has_conversion, _describe_merged, _rebuild_merged),
    "tuple": Kind(
        exactly(tuple, torch.Size),
        lambda value, to: {"items": to.each(value)},
        lambda node, make: tuple(make(node["items"])),
    ),
    "named_tuple": Kind(
        lambda value: isinstance(value, tuple) and hasattr(type(value), "_fields"),
        lambda value, to: {"class": code_names.reference(type(value), to.what), "items": to.each(value)},
        lambda node, make: code_names.named(node["class"])(*make(node["items"])),
    ),
    "set": Kind(
        exactly(*SETS.values()),
        lambda value, to: {"type": type(value).__name__, "items": to.each(value)},
        lambda node, make: SETS[node["type"]](make(node["items"])),
    ),
    "deque": Kind(
        exactly(deque),
        lambda value, to: {"items": to.each(value), "maxlen": value.maxlen},
        lambda node, make: deque(make(node["items"]), node["maxlen"]),
    ),
    "dict": Kind(exactly(*DICTS.values()), _describe_dict, _rebuild_dict),
    "type": Kind(
        lambda value: any(value is kind for kind in TYPES.values()),
        lambda value, to: {"name": value.__name__},
        lambda node, make: TYPES[node["name"]],
    ),
    "namespace": Kind(
        exactly(SimpleNamespace),
        lambda value, to: {"of": to(vars(value))},
        lambda node, make: SimpleNamespace(**make(node["of"])),
    ),
    "logger": Kind(
        of_types(logging.Logger),
        lambda value, to: {"name": value.name},
        lambda node, make: logging.getLogger(node["name"]),
    ),
    "tensor": Kind(
        of_types(Tensor),
        _describe_tensor,
        lambda node, make: make.tensors[node["name"]].to(_rebuild_device(node, make)),
    ),
    "array": Kind(
        lambda value: type(value) is numpy.ndarray and value.dtype.kind in "biuf",
        lambda value, to: {"of": to(torch.from_numpy(value))},
        lambda node, make: make(node["of"]).numpy(),
    ),
    "dtype": Kind(
        of_types(torch.dtype),
        lambda value, to: {"name": str(value).removeprefix("torch.")},
        lambda node, make: getattr(torch, node["name"]),
    ),
    "device": Kind(of_types(torch.device), lambda value, to: {"on_cpu": value.type == "cpu"}, _rebuild_device),
    "uuid": Kind(of_types(uuid.UUID), lambda value, to: {"of": str(value)}, lambda node, make: uuid.UUID(node["of"])),
    "enum": Kind(
        of_types(Enum),
        lambda value, to: {"class": code_names.reference(type(value), to.what), "name": value.name},
        lambda node, make: code_names.named(node["class"])[node["name"]],
    ),
    "missing": Kind(lambda value: value is MISSING, lambda value, to: {}, lambda node, make: MISSING),
    "name": Kind(
        _is_named,
        lambda value, to: {"name": code_names.reference(value, to.what)},
        lambda node, make: code_names.named(node["name"]),
    ),
    "decorated": Kind(
        lambda value: bool(_decorator(value)),
        lambda value, to: {"of": to(value.__wrapped__), "by": _decorator(value)},
        lambda node, make: DECORATORS[node["by"]](make(node["of"])),
    ),
    "function": Kind(of_types(FunctionType), _describe_function, _rebuild_function),
    "cell": Kind(
        of_types(CellType),
        _describe_cell,
        lambda node, make: CellType(make(node["of"])) if "of" in node else CellType(),
    ),
    "method": Kind(of_types(MethodType), _describe_method, _rebuild_method),
    "partial": Kind(
        exactly(functools.partial),
        lambda value, to: {"of": to(value.func), "args": to.each(value.args), "keywords": to(value.keywords)},
        lambda node, make: functools.partial(make(node["of"]), *make(node["args"]), **make(node["keywords"])),
    ),
    "builtin": Kind(
        lambda value: isinstance(value, BuiltinFunctionType) and _namespace_of(value) is not None,
        lambda value, to: {"module": _namespace_of(value).__name__, "name": value.__name__},  # type: ignore[union-attr]
        lambda node, make: _builtin_named(node["module"], node["name"]),
    ),
    "module": Kind(
        of_types(ModuleType),
        lambda value, to: {"name": _module_value(value, to.what)},
        lambda node, make: _module_of_value(node["name"]),
    ),
    "random": Kind(exactly(*STATES), describe_generator, rebuild_generator),
    "object": Kind(lambda value: True, _describe_object, _rebuild_object),
}
