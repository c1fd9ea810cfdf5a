"""Names of code: what ComfyUI's process calls a function or class, and what a worker finds under that name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from functools import reduce
from types import CodeType, ModuleType
from typing import Any

import comfy.options

from ..errors import Refused
from .fingerprint import code_fingerprint

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(comfy.options.__file__)))
PACKAGES = ("comfy", "comfy_extras")
EXTRA_NODES = "comfy_extras.nodes_"
LOCAL = ".<locals>."


class Unsendable(Refused):
    """Raised for a value that no description can be made of, most often because another pack's code made it: the
    sampling loop then runs in ComfyUI's process, and the workers only evaluate the network."""


def qualified_name(value: Any) -> str:
    """Returns `module.name` of a class, function or object's class; a custom node's module begins with its pack."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = module_name(named)
    return f"{module.rpartition(f'custom_nodes{os.sep}')[2]}.{named.__qualname__}"


def is_comfyui(value: Any) -> bool:
    """Is this class or function, or the class of this object, defined in ComfyUI's own packages?"""
    return module_name(value).split(".")[0] in PACKAGES


def module_name(value: Any) -> str:
    """Returns the module's name, also of extra nodes, which ComfyUI imports under the path of their file."""
    name = getattr(value, "__module__", None) or "?"
    return os.path.relpath(name, ROOT).replace(os.sep, ".") if name.startswith(ROOT + os.sep) else name


def reference(value: Any, what: str) -> str:
    """Returns `module:name` of a class or function that ComfyUI's own code has under that name. Raises Unsendable.

    ComfyUI runs a node as a copy of its class with the same name: the name is then that of the base class.
    """
    for named_value in inspect.getmro(value) if isinstance(value, type) else (value,):
        name = getattr(named_value, "__qualname__", "<>")
        if not is_comfyui(named_value) or "<" in name:
            break
        if attribute(sys.modules.get(named_value.__module__), name) is named_value:
            return f"{module_name(named_value)}:{name}"
    if is_comfyui(value) and LOCAL in value.__qualname__:
        raise Unsendable("unsendable.local", what=what, thing=qualified_name(value))
    raise Unsendable("unsendable.foreign", what=what, thing=qualified_name(value))


def attribute(owner: Any, path: str) -> Any:
    """Returns what `owner` has under a dotted path; None for nothing."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), owner)


def named(reference: str) -> Any:
    """Returns ComfyUI's class or function `module:name` or `module:Class.name`. Raises Refused for any other code."""
    module, _, name = reference.partition(":")
    if module.split(".")[0] in PACKAGES:
        value = reduce(getattr, name.split("."), module_named(module))
        defined_in = getattr(value, "__module__", None) or ""
        if defined_in.split(".")[0] in PACKAGES or defined_in == module_named(module).__name__:
            return value
    raise Refused("worker.reference", name=reference)


def module_named(name: str) -> ModuleType:
    """Imports a module of ComfyUI; extra nodes by file, as the host does, since some have circular imports."""
    if not name.startswith(EXTRA_NODES):
        return importlib.import_module(name)
    path = os.path.join(ROOT, *name.split("."))
    return sys.modules.get(path) or import_file(f"{path}.py", path)


def import_file(file: str, name: str) -> ModuleType:
    """Imports a source file as the module `name`, as ComfyUI does with nodes."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def code_named(reference: str, fingerprint: str) -> CodeType:
    """Returns the code of a function that another one defines, `module:outer.<locals>.inner`. Raises Refused where this
    process has another function of that name, as after an update while ComfyUI runs."""
    outermost, *inner = reference.split(LOCAL)
    codes = [named(outermost).__code__]
    for name in inner:
        inside = [part for code in codes for part in code.co_consts if isinstance(part, CodeType)]
        codes = [part for part in inside if part.co_name == name]
    code = next((code for code in codes if code_fingerprint(code) == fingerprint), None)
    if code is None:
        raise Refused("comfyui.changed", name=reference)
    return code
