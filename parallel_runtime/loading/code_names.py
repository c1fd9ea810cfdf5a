"""Names of code: what ComfyUI's process calls a function or class, and what a worker finds under that name: ComfyUI's
own, that of installed packs, and a few of torch's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from functools import reduce
from types import CodeType, FunctionType, ModuleType
from typing import Any

import comfy.options

from ..errors import Refused
from . import packs
from .fingerprint import code_fingerprint

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(inspect.getfile(comfy.options))))
PACKAGES = ("comfy", "comfy_extras", "nodes")
EXTRA_NODES = "comfy_extras.nodes_"
LIBRARIES = (  # whose functions and classes code of packs may refer to: none of them loads, or runs, what it is told
    "torch.autograd.grad_mode", "torch.functional", "torch.nn.functional", "torch.nn.modules.", "torch.nn.parameter",
    "torch.utils._contextlib", "einops.", "sageattention.", "flash_attn.",
)  # fmt: skip
LOCAL = ".<locals>."


class Unsendable(Refused):
    """Raised for a value that no description can be made of: the sampling loop then runs in ComfyUI's process, and the
    workers only evaluate the network."""


def qualified_name(value: Any) -> str:
    """Returns `module.name` of a class, function or object's class; a custom node's module begins with its pack."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = _dotted(getattr(named, "__module__", None) or "?")
    return f"{module.rpartition(f'custom_nodes{os.sep}')[2]}.{named.__qualname__}"


def is_comfyui(value: Any) -> bool:
    """Is this class or function, or the class of this object, defined in ComfyUI's own packages?"""
    return _dotted(getattr(value, "__module__", None) or "?").split(".")[0] in PACKAGES


def is_of_a_pack(value: Any) -> bool:
    """Is this class or function, or the class of this object, defined in another pack that is installed here?"""
    return packs.pack_of(home_of(value)) is not None


def home_of(value: Any) -> str:
    """Returns the name of the module that has a function's code, or that a class or object's class is defined in:
    functools.wraps gives a function another one's name."""
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else ""


def _dotted(module: str) -> str:
    """Returns the dotted name of an extra node's module, which ComfyUI imports under the path of its file."""
    return os.path.relpath(module, ROOT).replace(os.sep, ".") if module.startswith(ROOT + os.sep) else module


def module_reference(module: str, what: str, thing: str) -> str:
    """Returns this process's module as the workers know it. Raises Unsendable for one that they cannot have."""
    name = _dotted(module)
    if name.split(".")[0] in PACKAGES or name.startswith(LIBRARIES):
        return name
    try:
        reference = packs.pack_reference(module)
    except Refused as changed:
        raise Unsendable("unsendable.pack", what=what, thing=thing, reason=changed.sentence) from None
    if reference is None:
        raise Unsendable("unsendable.foreign", what=what, thing=thing)
    (pack,) = packs.packs_named(reference)
    if (reason := packs.unusable.get(pack)) is not None:
        raise Unsendable("unsendable.pack", what=what, thing=thing, reason=reason)
    return reference


def reference(value: Any, what: str) -> str:
    """Returns `module:name` of a class or function that workers have under that name. Raises Unsendable.

    ComfyUI runs a node as a copy of its class with the same name: the name is then that of the base class.
    """
    for candidate in inspect.getmro(value) if isinstance(value, type) else (value,):
        name = getattr(candidate, "__qualname__", "<>")
        if attribute(sys.modules.get(candidate.__module__), name) is candidate:
            return f"{module_reference(candidate.__module__, what, qualified_name(value))}:{name}"
        if "<" in name or name != value.__qualname__:
            break
    if LOCAL in value.__qualname__ and is_comfyui(value):
        raise Unsendable("unsendable.local", what=what, thing=qualified_name(value))
    raise Unsendable("unsendable.foreign", what=what, thing=qualified_name(value))


def attribute(owner: Any, path: str) -> Any:
    """Returns what `owner` has under a dotted path; None for nothing."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), owner)


def named(reference: str) -> Any:
    """Returns the class or function `module:name` or `module:Class.name`. Raises Refused for code of other modules than
    `module_reference` names."""
    module, _, name = reference.partition(":")
    home = module_named(module, reference)
    value = attribute(home, name)
    defined_in = getattr(value, "__module__", None) or ""
    if _dotted(defined_in).split(".")[0] in PACKAGES or defined_in == home.__name__ or packs.pack_of(defined_in):
        return value
    raise Refused("worker.reference", name=reference)


def module_named(name: str, of: str = "") -> ModuleType:
    """Imports a module by its reference, for the code `of` it. Extra nodes are imported by file, as the host does, as
    some have circular imports. Raises Refused for any other module."""
    if name.startswith(packs.PREFIX):
        return packs.pack_module(name)
    if name.split(".")[0] not in PACKAGES and not name.startswith(LIBRARIES):
        raise Refused("worker.reference", name=of or name)
    if not name.startswith(EXTRA_NODES):
        return importlib.import_module(name)
    path = os.path.join(ROOT, *name.split("."))
    return sys.modules.get(path) or _import_file(f"{path}.py", path)


def _import_file(file: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def code_named(reference: str, fingerprint: str) -> CodeType:
    """Returns the code of a function that another one defines, `module:outer.<locals>.inner`, or that a decorator has
    replaced. Raises Refused where this process has another function of that name, as after an update while ComfyUI
    runs."""
    module, _, path = reference.partition(":")
    outermost, *inner = path.split(LOCAL)
    codes = _codes(attribute(module_named(module), outermost))
    for name in ".".join(inner).split(".") if inner else ():  # a class inside of a function is code too
        inside = [part for code in codes for part in code.co_consts if isinstance(part, CodeType)]
        codes = [part for part in inside if part.co_name == name]
    code = next((code for code in codes if code_fingerprint(code) == fingerprint), None)
    if code is None:
        raise Refused("comfyui.changed", name=reference)
    return code


def _codes(value: Any) -> list[CodeType]:
    """Returns the code of a function and of those that its decorators have replaced."""
    value = getattr(value, "__func__", value)
    inner = getattr(value, "__wrapped__", None)
    return [*([value.__code__] if isinstance(value, FunctionType) else []), *(_codes(inner) if inner else [])]
