"""Global variables of packs, and attributes of their classes, which their nodes may set and their code read. Plain
values and tensors go to the workers and back.

Others are objects, functions, networks, caches. A worker has them as the pack's import has left them. While ComfyUI's
process has them so, too, none is sent; one that differs is sent, if it can be.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from enum import Enum
from functools import _lru_cache_wrapper, cached_property, partial
from inspect import signature
from itertools import chain, islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from comfy.model_patcher import ModelPatcher
from comfy.samplers import KSAMPLER
from torch import Tensor, nn

from ..errors import Refused
from .code_names import attribute, is_comfyui, is_of_a_pack, pack_module, pack_reference, packs_named, qualified_name
from .fingerprint import code_fingerprint, fingerprint
from .kinds import MISSING, attributes_of
from .names_in_code import code_names, names_set, read_by_computed_names

SENT = bool | int | float | str | torch.Tensor | torch.dtype | torch.device | None
MOST_ITEMS = 2000  # of a list or dict, with all in it: larger ones are tables that nothing sets
WRAPPERS = (
    classmethod, staticmethod, MethodType, property, partial, cached_property, _lru_cache_wrapper, KSAMPLER
)  # fmt: skip
WRAPPED = ("__func__", "__self__", "func", "fget", "__wrapped__", "sampler_function", "extra_options")
Globals = dict[str, dict[str, Any]]  # by module, as the workers know it: values by name
PARTS: dict[type, Callable[[Any], list[Any]]] = {
    ContextVar: lambda value: [value.get(None)],
    MethodType: lambda value: [value.__func__, value.__self__],
    partial: lambda value: [value.func, value.args, value.keywords],
    numpy.ndarray: lambda value: [str(value.dtype), value.shape, value.tobytes()],
    random.Random: lambda value: [value.getstate()],
    numpy.random.Generator: lambda value: [value.bit_generator.state],
    torch.Generator: lambda value: [value.get_state()],
}
PLAIN = bool | int | float | complex | str | bytes | None
MOST_PARTS = 20_000
MOST_NUMBERS = 100_000  # of a tensor; of a larger one some are compared
CONTAINERS = (MutableMapping, list, tuple, deque, set, frozenset)
OPEN = (SimpleNamespace, threading.local, nn.Module)  # of libraries, whose attributes are compared
SERVED = (("nodes", "NODE_CLASS_MAPPINGS"), ("server", "PromptServer.instance"))
CHANGING = {  # what functions name that give something else in each process
    "environ", "getenv", "now", "perf_counter", "rand", "randint", "randn", "random", "randperm", "time", "time_ns",
    "urandom",
}  # fmt: skip
unequal: set[str] = set()  # in ComfyUI's process, by name: what workers have refused
_first: dict[str, str] = {}  # in a worker, by name: the fingerprint before a run could change it


def globals_of(code: Iterable[FunctionType | type]) -> Globals:
    """Returns the plain variables among those that this code of packs reads."""
    found: Globals = {}
    for module, name, value in variables_of(code):
        if is_sent(value):
            found.setdefault(module, {})[name] = value
    return found


def variables_of(code: Iterable[FunctionType | type]) -> Iterator[tuple[str, str, Any]]:
    """Yields the global variables that functions of packs name, and the attributes with such names of packs' classes
    and functions: the module as the workers know it, the (dotted) name, the value."""
    code = [*code]
    functions = [one for one in code if isinstance(one, FunctionType)]
    read = frozenset[str]().union(*(code_names(function.__code__) for function in functions))
    whole = set[int]().union(*map(_read_whole, functions))
    for function in functions:
        yield from _globals_of(function)
    for one in code:
        if attribute(sys.modules.get(one.__module__), one.__qualname__) is one:
            module = pack_reference(one.__module__) or ""
            yield from ((module, f"{one.__qualname__}.{name}", value) for name, value in [*vars(one).items()]
                        if (name in read or id(one) in whole) and _is_data(name, value))  # fmt: skip


def _globals_of(function: FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yields the variables of its module, and of modules of packs that it names or imports, and of those in them: those
    that it names, also where they are gone; all where it computes names of them."""
    names, whole = code_names(function.__code__), _read_whole(function)
    todo = [function.__globals__, *map(vars, _imported_by(function))]
    seen = set[int]()
    while todo:
        variables = todo.pop()
        module = None if id(variables) in seen else pack_reference(variables.get("__name__", ""))
        seen.add(id(variables))
        if module is not None:
            known = {**dict.fromkeys(names_set(variables["__name__"]), MISSING), **variables}
            every = id(variables) in whole
            found = {name: value for name, value in known.items()
                     if name in names or (every and not name.startswith("__"))}  # fmt: skip
            yield from ((module, name, value) for name, value in found.items())
            todo += [vars(found[name]) for name in names & found.keys() if isinstance(found[name], ModuleType)]


def _imported_by(function: FunctionType) -> list[ModuleType]:
    """Returns modules that a function may import itself."""
    package = function.__globals__.get("__package__") or ""
    homes = [f"{package.rsplit('.', up)[0]}." for up in range(package.count(".") + 1)]  # of relative imports
    names = (home + name for home in ("", *homes) for name in code_names(function.__code__))
    return [module for module in map(sys.modules.get, names) if isinstance(module, ModuleType)]


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
    """Returns a global variable of a pack's module, or an attribute of a class there; MISSING for none."""
    owner, _, last = name.rpartition(".")
    return getattr(variable(module, owner) if owner else pack_module(module), last, MISSING)


def set_variable(module: str, name: str, value: Any) -> None:
    owner, _, last = name.rpartition(".")
    home = variable(module, owner) if owner else pack_module(module)
    if value is MISSING:
        vars(home).pop(last, None)
    else:
        setattr(home, last, value)


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
            todo += [*_closure_values(value), *(part for _, _, part in _globals_of(value))]
        elif isinstance(value, type):
            yield value
            todo += [part for base in value.__mro__ for part in vars(base).values()]
        else:
            todo += [type(value), *getattr(value, "__dict__", {}).values()]


def reads(code: Iterable[FunctionType | type]) -> Callable[[str], bool]:
    """Returns whether a function among this code may read an attribute of a name: one of those in it, or any where it
    computes names."""
    codes = [one.__code__ for one in code if isinstance(one, FunctionType)]
    names, computes = frozenset[str]().union(*map(code_names, codes)), any(map(read_by_computed_names, codes))
    return lambda name: computes or name in names


def _read_whole(function: FunctionType) -> set[int]:
    """Returns the ids of the variables of modules, and of classes, that a function reads by names that it computes."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closed = {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()}
    imported = {module.__name__.rpartition(".")[2]: module for module in _imported_by(function)}
    variables, found = {**imported, **function.__globals__, **closed}, set()
    for owner in read_by_computed_names(function.__code__):
        first, _, path = owner.partition(".")
        value = variables.get(first)
        value = attribute(value, path) if path else value
        found.add(id(vars(value) if isinstance(value, ModuleType) else value if owner else function.__globals__))
    return found


def _closure_values(function: FunctionType) -> list[Any]:
    """Returns the variables of the function around it that a function uses, but for those not assigned yet."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]


def _items(value: Any) -> float:
    """Counts the plain values in nested lists, tuples and dicts; infinite where anything else is in them."""
    if isinstance(value, SENT):
        return 1
    if type(value) is dict:
        return sum(_items(key) + _items(part) for key, part in value.items())
    return sum(map(_items, value)) if type(value) in (list, tuple) else float("inf")


def objects_of(code: Iterable[FunctionType | type]) -> dict[str, Any]:
    """Returns by `module:name`, as workers know it, the variables that this code of packs reads and that are not
    plain."""
    return {
        f"{module}:{name}": value
        for module, name, value in variables_of(code)
        if not (is_sent(value) or isinstance(value, ModuleType) or _is_constant(value, name))
    }


def check_states(wanted: dict[str, str]) -> dict[str, str]:
    """Returns these states of this worker. Raises Refused with the names of those that have been others from the first
    than they are in ComfyUI's process now."""
    now = {name: state(_variable_at(name)) for name in wanted}
    if other := [name for name in wanted if _first.setdefault(name, now[name]) != wanted[name]]:
        raise _differ(other)
    return now


def changed_states(before: dict[str, str]) -> list[str]:
    """Says which of these a run has changed here, where ComfyUI's process does not see it."""
    changed = [name for name, was in before.items() if state(_variable_at(name)) != was]
    return [str(_differ(changed))] if changed else []


def note_unequal(states: Iterable[str], error: Refused) -> None:
    """Remembers which of these the workers have refused: they are sent from now on, if they can be."""
    unequal.update(name for name in states if short(name) in error.values["name"].split(", "))


def set_objects(objects: Iterable[tuple[str, Any]]) -> None:
    for name, value in objects:
        module, _, path = name.partition(":")
        set_variable(module, path, value)


def short(name: str) -> str:
    return name.rpartition("/")[2].strip(".:")


def _differ(names: list[str]) -> Refused:
    (pack,) = packs_named(names[0])
    return Refused("pack.state", pack=pack.rpartition("@")[0], name=", ".join(map(short, names)))


def _variable_at(name: str) -> Any:
    """Returns the variable of this process at `module:name`."""
    module, _, path = name.partition(":")
    return variable(module, path)


def _is_constant(value: Any, name: str) -> bool:
    """Is this a class or function under its own name? Those of packs are reached themselves, with what is on them."""
    plain = isinstance(value, type) or (isinstance(value, FunctionType) and not value.__closure__)
    return plain and value.__name__ == name


def state(value: Any) -> str:
    """Fingerprints a value, without what each process has its own of, and no latent depends on."""
    served = [attribute(sys.modules.get(module), name) for module, name in SERVED]
    own = {id(one) for one in (os.environ, sys.stdout, sys.stderr, *served)}
    return fingerprint(*islice(_parts(value, own), MOST_PARTS))[:16]


def _parts(value: Any, seen: set[int]) -> Iterator[str | Tensor]:
    """Yields what a value consists of, the same in each process."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}"
        if not value.is_meta:
            yield value.detach().reshape(-1)[:: max(1, value.numel() // MOST_NUMBERS)]
    elif isinstance(value, PLAIN) and not isinstance(value, Enum):
        yield repr(value)
    elif id(value) not in seen:
        seen.add(id(value))
        yield f"{type(value).__qualname__} {_text(value)}"
        if isinstance(value, set | frozenset):
            yield from sorted(fingerprint(*_parts(part, set(seen))) for part in value)
        for part in _inside(value):
            yield from _parts(part, seen)


def _text(value: Any) -> str:
    """Returns what tells a value from others of its type, without its parts."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, FunctionType):
        return code_fingerprint(value.__code__)
    if isinstance(value, type | BuiltinFunctionType | ModuleType):
        return qualified_name(value)
    if is_of_a_pack(type(value)) or is_comfyui(value) or isinstance(value, (*CONTAINERS, *OPEN)):
        return ""
    text = repr(value)
    if hasattr(type(value), "__next__") and text.startswith("<"):  # a generator or open file: who knows where it is
        return str(os.getpid())
    return "" if text.startswith("<") or " at 0x" in text else text  # which differ in each process


def _inside(value: Any) -> Iterable[Any]:
    """Returns the parts that a value is compared by, besides those of a set."""
    if isinstance(value, type | ModelPatcher) or (is_comfyui(value) and isinstance(value, nn.Module)):
        return ()
    if isinstance(value, FunctionType):
        return [value.__defaults__, value.__kwdefaults__, *_closure_values(value), *vars(value).items()]
    if isinstance(value, _lru_cache_wrapper):
        return _kept(value)
    for kind, parts in PARTS.items():
        if isinstance(value, kind):
            return parts(value)
    items: Iterable[Any] = value if isinstance(value, list | tuple | deque) else ()
    items = chain(*value.items()) if isinstance(value, MutableMapping) else items
    own = attributes_of(value).items() if isinstance(value, OPEN) or is_of_a_pack(type(value)) else ()
    return [*items, *own]


def _kept(function: Any) -> list[Any]:
    """Returns what a function's cache has, if another process would not compute the same."""
    if not (kept := function.cache_info().currsize):
        return []
    if not signature(function).parameters:  # one object, which code may change
        value = function()
        return [value] if isinstance(value, (*CONTAINERS, *OPEN)) or is_of_a_pack(type(value)) else []
    used = (one.__code__ for one in reached([function]) if isinstance(one, FunctionType))
    return [kept] if any(code_names(code) & CHANGING for code in used) else []
