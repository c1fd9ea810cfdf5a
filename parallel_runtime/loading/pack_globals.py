"""Global variables of packs, and attributes of their classes, which their nodes may set and their code read. Plain
values and tensors go to the workers and back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from comfy.samplers import KSAMPLER

from .code_names import attribute, is_of_a_pack
from .packs import pack_module, pack_reference

PLAIN = bool | int | float | str | torch.Tensor | torch.dtype | torch.device | None
MOST_ITEMS = 2000  # of a list or dict, with all in it: larger ones are tables that nothing sets
WRAPPERS = (
    classmethod, staticmethod, MethodType, property, functools.partial, functools.cached_property,
    functools._lru_cache_wrapper, KSAMPLER,
)  # fmt: skip
WRAPPED = ("__func__", "__self__", "func", "fget", "__wrapped__", "sampler_function", "extra_options")
Globals = dict[str, dict[str, Any]]  # by module, as the workers know it: values by name


def globals_of(code: Iterable[FunctionType | type]) -> Globals:
    """Returns the plain variables among those that this code of packs reads."""
    found: Globals = {}
    for module, name, value in variables_of(code):
        if is_sent(value):
            found.setdefault(module, {})[name] = value
    return found


def variables_of(code: Iterable[FunctionType | type]) -> Iterator[tuple[str, str, Any]]:
    """Yields the global variables that functions of packs name, and the attributes with such names of packs' classes:
    the module as the workers know it, the (dotted) name, the value."""
    code = [*code]
    functions = [one for one in code if isinstance(one, FunctionType)]
    read = frozenset[str]().union(*(code_names(function.__code__) for function in functions))
    for function in functions:
        yield from _globals_of(function)
    for kind in (one for one in code if isinstance(one, type)):
        if attribute(sys.modules.get(kind.__module__), kind.__qualname__) is kind:
            module = pack_reference(kind.__module__) or ""
            yield from ((module, f"{kind.__qualname__}.{name}", vars(kind)[name])
                        for name in read & vars(kind).keys() if _is_data(name, vars(kind)[name]))  # fmt: skip


def _globals_of(function: FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yields the variables of its module, and of modules of packs that it names."""
    names = code_names(function.__code__)
    values = (function.__globals__.get(name) for name in names)
    modules = [vars(value) for value in values if isinstance(value, ModuleType)]
    for variables in (function.__globals__, *modules):
        if (module := pack_reference(variables.get("__name__", ""))) is not None:
            yield from ((module, name, variables[name]) for name in names & variables.keys())


def _is_data(name: str, value: Any) -> bool:
    return not (name.startswith("__") or callable(value) or hasattr(type(value), "__get__"))


def is_sent(value: Any) -> bool:
    return _items(value) <= MOST_ITEMS


def set_globals(values: Globals) -> None:
    """Sets global variables of this process; lists and dicts in place, since other modules may have imported them."""
    for module, by_name in values.items():
        for name, value in by_name.items():
            current = variable(module, name)
            if type(current) is type(value) is dict:
                current.clear()
                current.update(value)
            elif type(current) is type(value) is list:
                current[:] = value
            else:
                set_variable(module, name, value)


def variable(module: str, name: str) -> Any:
    """Returns a global variable of a pack's module, or an attribute of a class there."""
    return attribute(pack_module(module), name)


def set_variable(module: str, name: str, value: Any) -> None:
    owner, _, last = name.rpartition(".")
    setattr(variable(module, owner) if owner else pack_module(module), last, value)


def changed_globals(before: Globals) -> Globals:
    """Returns those of these variables that have other plain values by now."""
    changed: Globals = {}
    for module, by_name in before.items():
        for name, value in by_name.items():
            now = variable(module, name)
            if not _is_same(now, value) and is_sent(now):
                changed.setdefault(module, {})[name] = now
    return changed


def _is_same(now: Any, before: Any) -> bool:
    if type(now) is not type(before) or isinstance(now, torch.Tensor):
        return now is before
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return bool(now == before)


def reached(code: Iterable[Any]) -> Iterator[FunctionType | type]:
    """Yields the functions and classes of packs among `code`, which also are those of its objects, and those that they
    name."""
    todo, seen = list(code), set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, WRAPPERS):
            todo += [getattr(value, name) for name in WRAPPED if hasattr(value, name)]
        elif isinstance(value, list | tuple | dict | set):
            todo += value.values() if isinstance(value, dict) else value
        elif not is_of_a_pack(value):
            todo += [value.__wrapped__] if isinstance(value, FunctionType) and hasattr(value, "__wrapped__") else []
        elif isinstance(value, FunctionType):
            yield value
            cells = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())
            todo += [*cells, *(part for _, _, part in _globals_of(value))]
        elif isinstance(value, type):
            yield value
            todo += [part for base in value.__mro__ for part in vars(base).values()]
        else:
            todo += [type(value), *getattr(value, "__dict__", {}).values()]


@functools.cache
def code_names(code: CodeType) -> frozenset[str]:
    """Returns the names of global variables and attributes in this code and in functions that it defines."""
    inner = (code_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


def _items(value: Any) -> float:
    """Counts the plain values in nested lists, tuples and dicts; infinite where anything else is in them."""
    if isinstance(value, PLAIN):
        return 1
    if type(value) is dict:
        return sum(_items(key) + _items(part) for key, part in value.items())
    return sum(map(_items, value)) if type(value) in (list, tuple) else float("inf")
