"""Global variables of packs, plain values and tensors, which their nodes may set and their code read: they go to the
workers and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from .code_names import home_of, is_of_a_pack
from .packs import pack_module, pack_reference

PLAIN = bool | int | float | str | torch.Tensor | torch.dtype | torch.device | None
MOST_ITEMS = 2000  # of a list or dict, with all in it: larger ones are tables that nothing sets
Globals = dict[str, dict[str, Any]]  # by module, as the workers know it: values by name


def globals_of(code: Iterable[Any]) -> Globals:
    """Returns the plain global variables that functions, classes and objects of packs read, by themselves or through
    the packs' functions and classes that they name."""
    found: Globals = {}
    for function in _functions(code):
        module = pack_reference(home_of(function))
        for name in _names(function.__code__) if module is not None else ():
            value = function.__globals__.get(name)
            if name in function.__globals__ and _items(value) <= MOST_ITEMS:
                found.setdefault(module or "", {})[name] = value
    return found


def set_globals(values: Globals) -> None:
    """Sets global variables of this process; lists and dicts in place, since other modules may have imported them."""
    for module, by_name in values.items():
        variables = vars(pack_module(module))
        for name, value in by_name.items():
            current = variables.get(name)
            if type(current) is type(value) is dict:
                current.clear()
                current.update(value)
            elif type(current) is type(value) is list:
                current[:] = value
            else:
                variables[name] = value


def changed_globals(before: Globals) -> Globals:
    """Returns those of these variables that have other plain values by now."""
    changed: Globals = {}
    for module, by_name in before.items():
        variables = vars(pack_module(module))
        for name, value in by_name.items():
            now = variables.get(name)
            if not _is_same(now, value) and _items(now) <= MOST_ITEMS:
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


def _functions(code: Iterable[Any]) -> Iterator[FunctionType]:
    """Yields the functions of packs among `code` and what they reach."""
    todo, seen = list(code), set()
    while todo:
        value = todo.pop()
        value = getattr(value, "__func__", getattr(value, "func", getattr(value, "sampler_function", value)))
        value = getattr(value, "__wrapped__", value)  # in a decorator, such as torch.no_grad's
        if id(value) in seen or not is_of_a_pack(value):
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield value
            named = (value.__globals__.get(name) for name in _names(value.__code__))
            todo += [one for one in named if isinstance(one, FunctionType | type)]
        elif isinstance(value, type):
            todo += [part for base in value.__mro__ for part in vars(base).values()]
        else:
            todo.append(type(value))


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


def _items(value: Any) -> float:
    """Counts the plain values in nested lists, tuples and dicts; infinite where anything else is in them."""
    if isinstance(value, PLAIN):
        return 1
    if type(value) is dict:
        return sum(_items(key) + _items(part) for key, part in value.items())
    return sum(map(_items, value)) if type(value) in (list, tuple) else float("inf")
