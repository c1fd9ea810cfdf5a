"""Finds code that other packs put onto a network itself: the network that workers load would lack it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...parallel_runtime.errors import Refused
from .comfy_objects import is_comfyui, qualified_name

CUSTOM_NODES = f"{os.sep}custom_nodes{os.sep}"
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_network(network: nn.Module) -> None:
    """Raises Refused for a method or hook that the network's own class does not have. Takes 2 us for each module."""
    kinds = set()
    for name, module in network.named_modules():
        kinds.add(type(module))
        check_module(module, name or type(network).__name__)
    for kind in kinds:
        for name, code in _replaced_methods(kind):
            _refuse(f"{kind.__qualname__}.{name} of all networks", code)


def check_module(module: nn.Module, name: str) -> None:
    """Raises Refused for a method or hook on this module itself, without its children."""
    attributes = vars(module)
    kind: Any = type(module)
    for method in attributes.keys() & _methods(kind):
        if not is_comfyui(attributes[method]):
            _refuse(f"{name}.{method}", attributes[method])
    for hook in (hook for hooks in HOOKS for hook in attributes[hooks].values()):
        if not is_comfyui(hook):
            _refuse(f"a hook on {name}", hook)


def _refuse(what: str, code: Any) -> None:
    raise Refused("network.changed", what=what, code=qualified_name(code))


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if inspect.isfunction(inspect.getattr_static(kind, name)))


def _replaced_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the methods of `kind` that another pack has replaced in the class."""
    for base in kind.__mro__:
        for name, value in vars(base).items():
            code = getattr(value, "__code__", None)
            if code is not None and CUSTOM_NODES in code.co_filename and value.__module__ != base.__module__:
                yield name, value
