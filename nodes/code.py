"""ComfyUI's own functions, classes and objects in words: by name, with the values that they hold on to.

Only names and values travel, never code. The other side is worker/comfy_loop/code.py.
"""

from __future__ import annotations

import inspect
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from types import CellType, FunctionType, MethodType
from typing import Any

import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher

from ..parallel_runtime.errors import Refused
from .files import patch_file

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(comfy.samplers.__file__)))
PACKAGES = ("comfy", "comfy_extras")
LOCAL = ".<locals>."
PLAIN = bool | int | float | str | None


@dataclass(frozen=True, eq=False)
class Words:
    """What has been described already, or stands for something that cannot be."""

    words: Any


class Unsendable(Refused):
    """Something that is not ComfyUI's own, or that has no words: workers cannot have it, ComfyUI's process can."""


def title(thing: Any) -> str:
    """`module.name` of a class or function, or of an object's class; a custom node's module begins with its pack."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    module = _module(named)
    return f"{module.rpartition(f'custom_nodes{os.sep}')[2]}.{named.__qualname__}"


def reference(thing: Any, what: str) -> str:
    """`module:name` of a class or function that ComfyUI's own code has under that name. Raises Unsendable.

    ComfyUI runs a node as a copy of its class, made on the spot in the class's name: that is the class.
    """
    for found in inspect.getmro(thing) if isinstance(thing, type) else (thing,):
        name = getattr(found, "__qualname__", "<>")
        if not is_comfyui(found) or "<" in name:
            break
        if _found(found.__module__, name) is found:
            return f"{_module(found)}:{name}"
    raise Unsendable(f"{what} {title(thing)} is not part of ComfyUI itself, so the workers cannot have it")


def is_comfyui(thing: Any) -> bool:
    """Is this class or function defined in ComfyUI's own packages?"""
    return _module(thing).split(".")[0] in PACKAGES


def describe(value: Any, what: str) -> Any:
    """`value` for a bundle: plain values and tensors as they are, in lists and tuples; all else as {"kind": ...}.

    An object that is held twice is one object again at the other end. Raises Unsendable, naming `what`, for anything
    that is not ComfyUI's own.
    """
    return _Describer().describe(value, what, ())


class _Describer:
    """Numbers the objects of one description."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def describe(self, value: Any, what: str, within: tuple[int, ...]) -> Any:
        """`within` are the values around this one."""
        if isinstance(value, PLAIN) and not isinstance(value, Enum):
            return value
        if id(value) in within:
            raise Unsendable(f"{what} holds a {title(value)} that holds itself, which cannot be sent to the workers")

        def inner(part: Any) -> Any:
            around = f"{what} {title(value)}" if isinstance(value, FunctionType) else what
            return self.describe(part, around, (*within, id(value)))

        if isinstance(value, list | tuple | dict | set | frozenset):
            return _container(value, what, inner)
        if isinstance(value, torch.Tensor):
            return _tensor(value, what)
        if isinstance(value, Words):
            return value.words
        if isinstance(value, ModelPatcher):
            return _model(value, what)
        if isinstance(value, FunctionType):
            return self._function(value, what, inner)
        if isinstance(value, MethodType):
            return {"kind": "method", "of": inner(value.__self__), "name": value.__name__}
        return _named(value, what) or self._object(value, what, inner)

    def _function(self, function: FunctionType, what: str, inner: Callable[[Any], Any]) -> dict[str, Any]:
        if LOCAL not in function.__qualname__:
            return {"kind": "name", "name": reference(function, what)}
        if not is_comfyui(function):
            raise Unsendable(f"{what} {title(function)} is not part of ComfyUI itself, so the workers cannot have it")
        return {
            "kind": "function",
            "name": f"{_module(function)}:{function.__qualname__}",
            "line": function.__code__.co_firstlineno,
            "cells": [self._cell(cell, inner) for cell in function.__closure__ or ()],
            "defaults": inner(function.__defaults__),
            "keyword_defaults": inner(function.__kwdefaults__),
            "attributes": inner({name: value for name, value in vars(function).items() if name != "__wrapped__"}),
        }

    def _cell(self, cell: CellType, inner: Callable[[Any], Any]) -> dict[str, Any]:
        """A variable that functions hold on to, and may share."""
        if id(cell) in self._numbers:
            return {"kind": "same", "number": self._numbers[id(cell)]}
        held = inner(cell.cell_contents)
        return {"kind": "cell", "of": held, "number": self._numbers.setdefault(id(cell), len(self._numbers))}

    def _object(self, value: Any, what: str, inner: Callable[[Any], Any]) -> dict[str, Any]:
        if id(value) in self._numbers:
            return {"kind": "same", "number": self._numbers[id(value)]}
        if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__") or not is_comfyui(type(value)):
            raise Unsendable(f"{what} holds a {title(type(value))}, which cannot be sent to the workers")
        name, attributes = reference(type(value), what), inner(vars(value))
        number = self._numbers.setdefault(id(value), len(self._numbers))
        return {"kind": "object", "class": name, "attributes": attributes, "number": number}


def _named(value: Any, what: str) -> dict[str, Any] | None:
    """What a name is enough for."""
    match value:
        case torch.dtype():
            return {"kind": "dtype", "name": str(value).removeprefix("torch.")}
        case uuid.UUID():
            return {"kind": "uuid", "text": str(value)}
        case Enum():
            return {"kind": "enum", "class": reference(type(value), what), "name": value.name}
        case type():
            return {"kind": "name", "name": reference(value, what)}
    return None


def _container(value: Any, what: str, inner: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)([inner(part) for part in value])
    if type(value) is dict:
        return {"kind": "dict", "items": [[inner(key), inner(part)] for key, part in value.items()]}
    if type(value) is set:
        return {"kind": "set", "items": [inner(part) for part in value]}
    raise Unsendable(f"{what} holds a {title(type(value))}, which cannot be sent to the workers")


def _model(value: ModelPatcher, what: str) -> dict[str, Any]:
    try:
        return patch_file(value)
    except LookupError as why:
        kinds = f"{title(type(value))} with a {title(type(value.model))}"
        raise Unsendable(f"{what} holds a {kinds}, which cannot be sent to the workers: {why}") from None


def _tensor(value: torch.Tensor, what: str) -> Any:
    if value.is_meta:
        raise Refused(f"{what} holds a weight that is not in ComfyUI's memory, so it cannot be sent to the workers")
    return value if value.device.type == "cpu" else {"kind": "on_device", "of": value}


def _module(thing: Any) -> str:
    """ComfyUI imports its extra nodes, like custom nodes, under the path of their file."""
    name = getattr(thing, "__module__", None) or "?"
    return os.path.relpath(name, ROOT).replace(os.sep, ".") if name.startswith(ROOT + os.sep) else name


def _found(module: str, name: str) -> Any:
    return reduce(lambda owner, part: getattr(owner, part, None), name.split("."), sys.modules.get(module))
