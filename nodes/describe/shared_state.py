"""Finds state that code on a MODEL keeps: variables that its functions write to, and objects that two of them share.

It reads the functions themselves, whichever node made them. State inside an evaluation matters because workers may
evaluate different prompts or images, and each would keep the state of its own only.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...parallel_runtime.errors import Refused
from .comfy_objects import PLAIN, is_comfyui, qualified_name
from .model_patches import AROUND_NETWORK

STATELESS = (*PLAIN.__args__, Enum, type, types.ModuleType, torch.Tensor, torch.dtype, torch.nn.Module, ModelPatcher)
FUNCTION = "model_function_wrapper"  # the model option that is called around each evaluation
AROUND = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)  # wrappers around one evaluation


@dataclass
class Reachable:
    """The ids of mutable `objects` and of variables (`cells`) that can be reached from one function or value, and of
    the variables that it writes to (`written`)."""

    of: Any
    objects: set[int] = field(default_factory=set)
    cells: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._follow(self.of)

    def shares(self, other: Reachable) -> bool:
        """Can one of the two change what the other sees?"""
        written = (self.written | other.written) & self.cells & other.cells
        return self.of is not other.of and bool(written or self.objects & other.objects)

    def _follow(self, value: Any) -> None:
        if isinstance(value, STATELESS) or id(value) in self.objects:
            return
        if isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif isinstance(value, types.MethodType):
            self._follow((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._follow((value.func, value.args, value.keywords))
        else:
            if not isinstance(value, tuple):
                self.objects.add(id(value))
            for part in _parts(value):
                self._follow(part)

    def _follow_function(self, function: types.FunctionType) -> None:
        names = _written_variables(function.__code__)
        self._follow((function.__defaults__ or (), tuple((function.__kwdefaults__ or {}).values())))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name in names:
                self.written.add(id(cell))
            if id(cell) not in self.cells:
                self.cells.add(id(cell))
                self._follow(_cell_content(cell))


def keeps_state(model: ModelPatcher, options: dict[str, Any]) -> bool:
    """Does code inside evaluations keep state, with these model options?"""
    inside, outside = _reachable(model, options, (*AROUND, FUNCTION))
    return any(one.written or any(map(one.shares, inside + outside)) for one in inside)


def check_state(model: ModelPatcher, options: dict[str, Any]) -> None:
    """Raises Refused for code in the network's blocks that shares state with code in ComfyUI's process."""
    inside, outside = _reachable(model, options, ())
    for one in inside:
        for other in filter(one.shares, outside):
            raise Refused("model.state", one=qualified_name(one.of), other=qualified_name(other.of))


def _reachable(
    model: ModelPatcher, options: dict[str, Any], around: tuple[str, ...]
) -> tuple[list[Reachable], list[Reachable]]:
    """Returns what code inside evaluations, the wrappers `around` them included, can reach; and what other code can."""
    blocks = options.get("transformer_options", {})
    inside = [value for key, value in blocks.items() if key not in AROUND_NETWORK]
    outside = [value for key, value in options.items() if key not in ("transformer_options", *around)]
    inside += [value for key, value in options.items() if key in around]
    for functions in (blocks.get("wrappers", {}), model.wrappers, model.callbacks):
        for kind, by_key in functions.items():
            (inside if kind in around else outside).append(by_key)
    return [one for one in _each_reachable(inside) if is_comfyui(one.of)], [*_each_reachable(outside)]


def _each_reachable(values: list[Any]) -> Iterator[Reachable]:
    """Yields one Reachable for each different function or value in nested lists and dicts."""
    parts: list[Any] = list(values)
    seen: set[int] = set()
    while parts:
        value = parts.pop()
        if isinstance(value, dict | list | tuple):
            parts += _parts(value)
        elif not isinstance(value, STATELESS) and id(value) not in seen:
            seen.add(id(value))
            yield Reachable(value)


def _parts(value: Any) -> list[Any]:
    """Returns the parts of a container or of ComfyUI's object; none for a foreign object, which may hold anything."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if not isinstance(value, dict):
        value = vars(value) if hasattr(value, "__dict__") and is_comfyui(value) else {}
    return list(value.values())


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned to it yet
        return None


@functools.cache
def _written_variables(code: types.CodeType) -> frozenset[str]:
    """Returns the outer functions' variables that a function's code, or one of its inner functions, assigns to."""
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = (_written_variables(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(assigned.union(*inner) & set(code.co_freevars))
