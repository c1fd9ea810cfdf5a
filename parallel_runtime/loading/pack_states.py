"""Global variables of packs that are not plain: objects, functions, networks, caches. A worker has them as the pack's
import has left them. While ComfyUI's process has them so, too, none is sent; one that differs is sent, if it can be."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from enum import Enum
from functools import _lru_cache_wrapper, partial
from inspect import signature
from itertools import chain, islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ..errors import Refused
from .code_names import attribute, is_comfyui, is_of_a_pack, qualified_name
from .fingerprint import code_fingerprint, fingerprint
from .kinds import attributes_of
from .pack_globals import code_names, is_sent, reached, set_variable, variable, variables_of
from .packs import packs_named

PARTS: dict[type, Callable[[Any], list[Any]]] = {
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
    now = {name: state(_here(name)) for name in wanted}
    if other := [name for name in wanted if _first.setdefault(name, now[name]) != wanted[name]]:
        raise _differ(other)
    return now


def changed_states(before: dict[str, str]) -> list[str]:
    """Says which of these a run has changed here, where ComfyUI's process does not see it."""
    changed = [name for name, was in before.items() if state(_here(name)) != was]
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


def _here(name: str) -> Any:
    module, _, path = name.partition(":")
    return variable(module, path)


def _is_constant(value: Any, name: str) -> bool:
    """Is this a class or function under its own name, without anything on it? Those of packs are reached themselves."""
    plain = isinstance(value, type) or (isinstance(value, FunctionType) and not value.__closure__ and not vars(value))
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
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [value.__defaults__, value.__kwdefaults__, *cells, *vars(value).items()]
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
