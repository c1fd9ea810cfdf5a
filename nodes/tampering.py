"""Code that other packs put onto a network itself: workers load the network anew, and would be without it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..parallel_runtime.errors import Refused
from .code import is_comfyui, title
from .patches import WAY_OUT

PACKS = f"{os.sep}custom_nodes{os.sep}"
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_network(network: nn.Module) -> None:
    """Raises Refused for a method or a hook that is not from the network's own class, by name. 2 us a module."""
    kinds = set()
    for name, module in network.named_modules():
        kinds.add(type(module))
        check_module(module, name or type(network).__name__)
    for kind in kinds:
        for name, code in _replaced_in(kind):
            _refuse(f"{kind.__qualname__}.{name} of all networks", code)


def check_module(module: nn.Module, name: str) -> None:
    """The same for one module and what lies on it alone."""
    own = vars(module)
    kind: Any = type(module)
    for method in own.keys() & _methods(kind):
        if not is_comfyui(own[method]):
            _refuse(f"{name}.{method}", own[method])
    for hook in (hook for hooks in HOOKS for hook in own[hooks].values()):
        if not is_comfyui(hook):
            _refuse(f"a hook on {name}", hook)


def _refuse(what: str, code: Any) -> None:
    raise Refused(
        f"inside the network there is {what} ({title(code)}), which the workers' network does not have; {WAY_OUT}"
    )


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if inspect.isfunction(inspect.getattr_static(kind, name)))


def _replaced_in(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods that a pack put into a class which is not its own."""
    for base in kind.__mro__:
        for name, value in vars(base).items():
            code = getattr(value, "__code__", None)
            if code is not None and PACKS in code.co_filename and value.__module__ != base.__module__:
                yield name, value
