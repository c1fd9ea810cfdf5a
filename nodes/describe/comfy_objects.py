"""Describes ComfyUI's own functions, classes and objects by their names and the values that they refer to.

Only names and values travel, never code. worker/comfy_loop/rebuild.py makes the objects again.
"""

from __future__ import annotations

import inspect
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache, reduce
from numbers import Number
from types import CellType, FunctionType, MethodType
from typing import Any

import comfy.samplers
import torch
from comfy.controlnet import ControlBase
from comfy.gligen import Gligen
from comfy.model_management import cast_to_device
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.loading.fingerprint import code_fingerprint
from .control_nets import KINDS, called_functions, describe_control_net, is_patched
from .model_files import gligen_file, hypernetwork_file, patch_file

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(comfy.samplers.__file__)))
PACKAGES = ("comfy", "comfy_extras")
LOCAL = ".<locals>."
HYPERNETWORK = "comfy_extras.nodes_hypernetwork.load_hypernetwork_patch.<locals>.hypernetwork_patch"
PLAIN = bool | int | float | str | None
# Each run sets these attributes of objects and variables of functions before it reads them.
SET_BY_EACH_RUN = {
    "comfy.context_windows:IndexListContextHandler": ("_model",),
    "comfy_extras.nodes_tomesd:TomePatchModel.execute.<locals>.tomesd_m": ("u",),
    "comfy_extras.nodes_tomesd:TomePatchModel.execute.<locals>.tomesd_u": ("u",),
}


@dataclass(frozen=True, eq=False)
class Description:
    """The description of a value that was made elsewhere, or of a substitute for a value that cannot be described."""

    of: Any


class Unsendable(Refused):
    """Raised for a value that no description can be made of, most often because another pack's code made it: the
    sampling loop then runs in ComfyUI's process, and the workers only evaluate the network."""


def qualified_name(value: Any) -> str:
    """Returns `module.name` of a class, function or object's class; a custom node's module begins with its pack."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = _module(named)
    return f"{module.rpartition(f'custom_nodes{os.sep}')[2]}.{named.__qualname__}"


def reference(value: Any, what: str) -> str:
    """Returns `module:name` of a class or function that ComfyUI's own code has under that name. Raises Unsendable.

    ComfyUI runs a node as a copy of its class with the same name: the name is then that of the base class.
    """
    for named in inspect.getmro(value) if isinstance(value, type) else (value,):
        name = getattr(named, "__qualname__", "<>")
        if not is_comfyui(named) or "<" in name:
            break
        if _attribute(named.__module__, name) is named:
            return f"{_module(named)}:{name}"
    if is_comfyui(value) and LOCAL in value.__qualname__:
        raise Unsendable("unsendable.local", what=what, thing=qualified_name(value))
    raise Unsendable("unsendable.foreign", what=what, thing=qualified_name(value))


def is_comfyui(value: Any) -> bool:
    """Is this class or function, or the class of this object, defined in ComfyUI's own packages?"""
    return _module(value).split(".")[0] in PACKAGES


class Describer:
    """Describes values that a worker rebuilds in the same order: plain values, tensors, lists and tuples stay, and all
    else becomes {"kind": ...}. An object that is in two of them is rebuilt once. ControlNets are described for a
    `latent` of shape [B, C, (T,) H, W]; None leaves out hints that a VAE encodes."""

    def __init__(self, latent: tuple[int, ...] | None = None) -> None:
        self._latent = latent
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the described objects alive, so that no other gets the id of one

    def describe(self, value: Any, what: str) -> Any:
        """Describes `value`. Raises Unsendable, naming `what`, for anything that is not ComfyUI's own."""
        before = dict(self._numbers)
        try:
            return self._describe(value, what, ())
        except Unsendable:
            self._numbers = before  # the worker will make none of its parts
            raise

    def _number(self, value: Any) -> int:
        self._alive.append(value)
        return self._numbers.setdefault(id(value), len(self._numbers))

    def _describe(self, value: Any, what: str, within: tuple[int, ...]) -> Any:
        """`within`: the ids of the values around this one."""
        if isinstance(value, PLAIN | Number) and not isinstance(value, Enum):
            return getattr(value, "item", lambda: value)()  # numpy's numbers have one
        if id(value) in within:
            raise Unsendable("unsendable.loop", what=what, thing=qualified_name(value))

        def inner(part: Any) -> Any:
            around = f"{what} {qualified_name(value)}" if isinstance(value, FunctionType) else what
            return self._describe(part, around, (*within, id(value)))

        if isinstance(value, list | tuple | dict | set | frozenset):
            return _describe_container(value, what, inner)
        if isinstance(value, torch.Tensor):
            return _describe_tensor(value, what)
        if isinstance(value, Description):
            return value.of
        if isinstance(value, ModelPatcher):
            return _describe_loaded(patch_file, value, what)
        if isinstance(value, FunctionType):
            return self._function(value, what, inner)
        if isinstance(value, MethodType):
            return {"kind": "method", "of": inner(value.__self__), "name": _own_name(value, what)}
        return _describe_by_name(value, what) or self._object(value, what, inner)

    def _function(self, function: FunctionType, what: str, inner: Callable[[Any], Any]) -> dict[str, Any]:
        if LOCAL not in function.__qualname__:
            return {"kind": "name", "name": reference(function, what)}
        if not is_comfyui(function):
            raise Unsendable("unsendable.foreign", what=what, thing=qualified_name(function))
        name = f"{_module(function)}:{function.__qualname__}"
        variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        made_anew = SET_BY_EACH_RUN.get(name, ())
        return {
            "kind": "function",
            "name": name,
            "code": code_fingerprint(function.__code__),
            "cells": [self._cell(cell, inner, made_anew=variable in made_anew) for variable, cell in variables],
            "defaults": inner(function.__defaults__),
            "keyword_defaults": inner(function.__kwdefaults__),
            "attributes": inner({name: value for name, value in vars(function).items() if name != "__wrapped__"}),
        }

    def _cell(self, cell: CellType, inner: Callable[[Any], Any], *, made_anew: bool) -> dict[str, Any]:
        """Describes a closure's variable, which several functions may share."""
        if id(cell) in self._numbers:
            return {"kind": "same", "number": self._numbers[id(cell)]}
        contents = None if made_anew else inner(cell.cell_contents)
        return {"kind": "cell", "of": contents, "number": self._number(cell)}

    def _control_net(self, value: ControlBase, what: str, inner: Callable[[Any], Any]) -> dict[str, Any]:
        if is_patched(value) or not all(map(is_comfyui, called_functions(value))):
            raise Unsendable("unsendable.control.patched", what=what)
        try:
            described = describe_control_net(value, self._latent, inner)
        except LookupError:
            raise Unsendable("unsendable.control.file", what=what) from None
        if described is None:
            raise Unsendable("unsendable.control.part", what=what)
        return {**described, "number": self._number(value)}

    def _object(self, value: Any, what: str, inner: Callable[[Any], Any]) -> dict[str, Any]:
        if id(value) in self._numbers:
            return {"kind": "same", "number": self._numbers[id(value)]}
        if type(value) in KINDS:
            return self._control_net(value, what, inner)
        if isinstance(value, Gligen):
            return {"kind": "network", "of": _describe_loaded(gligen_file, value, what)}
        if qualified_name(value) == HYPERNETWORK:
            return {**_describe_loaded(hypernetwork_file, value, what), "number": self._number(value)}
        if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__") or not is_comfyui(type(value)):
            raise Unsendable("unsendable.object", what=what, thing=qualified_name(type(value)))
        name = reference(type(value), what)
        made_anew = SET_BY_EACH_RUN.get(name, ())
        attributes = inner({key: part for key, part in vars(value).items() if key not in made_anew})
        return {"kind": "object", "class": name, "attributes": attributes, "number": self._number(value)}


def _own_name(method: MethodType, what: str) -> str:
    """Returns the name of a bound method. Raises Unsendable for a function that its object's class does not have."""
    owner = method.__self__ if isinstance(method.__self__, type) else type(method.__self__)
    own = getattr(owner, method.__name__, None)
    if getattr(own, "__func__", own) is not method.__func__:
        raise Unsendable("unsendable.foreign", what=what, thing=qualified_name(method.__func__))
    return method.__name__


def _describe_by_name(value: Any, what: str) -> dict[str, Any] | None:
    """Describes a value by its name alone; returns None for a value that needs more."""
    match value:
        case torch.dtype():
            return {"kind": "dtype", "name": str(value).removeprefix("torch.")}
        case uuid.UUID():
            return {"kind": "uuid", "text": str(value)}
        case torch.device():
            return {"kind": "device", "on_cpu": value.type == "cpu"}
        case Enum():
            return {"kind": "enum", "class": reference(type(value), what), "name": value.name}
        case type():
            return {"kind": "name", "name": reference(value, what)}
    return None


def _has_conversion(value: Any) -> bool:
    """Is this a weight of a merged model, with the method of its layer of ComfyUI's that dequantizes it?"""
    if type(value) is not tuple or len(value) != 2 or not isinstance(value[1], MethodType):
        return False
    weight, method = value
    return isinstance(weight, torch.Tensor) and is_comfyui(method) and method.__name__.startswith("convert_")


def _merged_weight(weight: torch.Tensor, convert: MethodType) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Returns the weight with a function that leaves it as it is: no layer can be sent. It is dequantized as ComfyUI
    does it to merge it, in float32."""
    if type(weight.data) is not torch.Tensor or weight.itemsize == 1:
        weight = convert(cast_to_device(weight, weight.device, torch.float32, copy=True), inplace=True)
    return weight, _unconverted()


@cache
def _unconverted() -> Callable[..., Any]:
    """Returns the function that ComfyUI has beside a merged weight whose layer converts nothing."""
    cpu = torch.device("cpu")
    function: Callable[..., Any] = ModelPatcher(torch.nn.Linear(1, 1), cpu, cpu).get_key_patches()["weight"][0][1]
    return function


def _describe_container(value: Any, what: str, inner: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Size):
        return tuple(value)
    if _has_conversion(value):
        value = _merged_weight(*value)
    if type(value) in (list, tuple):
        return type(value)([inner(part) for part in value])
    if type(value) is dict:
        return {"kind": "dict", "items": [[inner(key), inner(part)] for key, part in value.items()]}
    if type(value) is set:
        return {"kind": "set", "items": [inner(part) for part in value]}
    raise Unsendable("unsendable.object", what=what, thing=qualified_name(type(value)))


def _describe_loaded(describe_file: Callable[[Any], dict[str, Any]], value: Any, what: str) -> dict[str, Any]:
    """Describes a value that has the weights of a file. Raises Unsendable where no file has them."""
    try:
        return describe_file(value)
    except LookupError as why:
        kinds = qualified_name(type(value))
        if isinstance(value, ModelPatcher):
            kinds += f" with a {qualified_name(type(value.model))}"
        raise Unsendable("unsendable.object.because", what=what, thing=kinds, reason=why) from None


def _describe_tensor(value: torch.Tensor, what: str) -> Any:
    if value.is_meta:
        raise Refused("unsendable.weight", what=what)
    return value if value.device.type == "cpu" else {"kind": "on_device", "of": value}


def _module(value: Any) -> str:
    """Returns the module's name, also of extra nodes, which ComfyUI imports under the path of their file."""
    name = getattr(value, "__module__", None) or "?"
    return os.path.relpath(name, ROOT).replace(os.sep, ".") if name.startswith(ROOT + os.sep) else name


def _attribute(module: str, name: str) -> Any:
    return reduce(lambda owner, part: getattr(owner, part, None), name.split("."), sys.modules.get(module))
