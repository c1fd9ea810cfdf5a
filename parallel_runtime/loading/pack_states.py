"""Global variables of packs, and attributes of their classes, which their nodes may set and their code read. Plain
values and tensors go to the workers and back.

Others are objects, functions, networks, caches. A worker has them as the pack's import has left them. While ComfyUI's
process has them so, too, none is sent; one that differs is sent, if it can be.
"""

from __future__ import annotations

import dis
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import _lru_cache_wrapper, cache, cached_property, partial
from inspect import signature
from itertools import chain, islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from comfy.model_patcher import ModelPatcher
from comfy.samplers import KSAMPLER
from torch import Tensor, nn

from ..errors import Refused
from . import code_names
from .fingerprint import code_fingerprint, fingerprint
from .kinds import MISSING, attributes_of

SENT = bool | int | float | str | torch.Tensor | torch.dtype | torch.device | None
MOST_ITEMS = 2000  # of a list or dict, with all in it: larger ones are tables that nothing sets
WRAPPERS = (
    classmethod, staticmethod, MethodType, property, partial, cached_property, _lru_cache_wrapper, KSAMPLER
)  # fmt: skip
WRAPPED = ("__func__", "__self__", "func", "fget", "__wrapped__", "sampler_function", "extra_options")
Variables = dict[str, Any]  # by place: `module:name`, with the module as the workers know it
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
UNSEEN = {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}
BY_NAME = {  # a letter for each step of code that loads one of these: capital where it reads variables by name
    "getattr": "G", "hasattr": "G", "attrgetter": "A", "globals": "B", "vars": "V", "__dict__": "D", "eval": "E",
    "exec": "E", "getmembers": "E", "self": "s", "get": "g",
}  # fmt: skip
BY_TEXT = {"__dict__", "attrgetter", "getattr", "globals", "hasattr", "vars"}  # what takes names as strings
unequal: set[str] = set()  # in ComfyUI's process, by name: what workers have refused
_first: dict[str, str] = {}  # in a worker, by name: the fingerprint before a run could change it


def read_by(code: Iterable[FunctionType | type]) -> tuple[Variables, Variables]:
    """Returns the variables that this code of packs reads: those of plain values, and others that it may change."""
    plain, objects = Variables(), Variables()
    for place, value in _variables_of([*code]):
        if _items(value) <= MOST_ITEMS:
            plain[place] = value
            continue
        # Classes and functions under their own names are reached themselves, with what is on them.
        name = place.rpartition(":")[2]
        is_code = isinstance(value, type) or (isinstance(value, FunctionType) and not value.__closure__)
        if not (isinstance(value, ModuleType) or (is_code and value.__name__ == name)):
            objects[place] = value
    return plain, objects


def _variables_of(code: Sequence[FunctionType | type]) -> Iterator[tuple[str, Any]]:
    """Yields the global variables that functions of packs name, and the attributes with such names of packs' classes
    and functions, each with its place."""
    functions = [one for one in code if isinstance(one, FunctionType)]
    read = frozenset[str]().union(*(names_in(function.__code__) for function in functions))
    whole = set[int]().union(*map(_read_whole, functions))
    for function in functions:
        yield from _globals_of(function)
    for one in code:
        if code_names.attribute(sys.modules.get(one.__module__), one.__qualname__) is one:
            owner = f"{code_names.pack_reference(one.__module__) or ''}:{one.__qualname__}"
            for name, value in [*vars(one).items()]:
                is_data = not (name.startswith("__") or callable(value) or hasattr(type(value), "__get__"))
                if is_data and (name in read or id(one) in whole):
                    yield f"{owner}.{name}", value


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the variables of its module, and of modules of packs that it names or imports, and of those in them: those
    that it names, also where they are gone; all where it computes names of them."""
    names, whole = names_in(function.__code__), _read_whole(function)
    todo = [function.__globals__, *map(vars, _imported_by(function))]
    seen = set[int]()
    while todo:
        variables = todo.pop()
        module = None if id(variables) in seen else code_names.pack_reference(variables.get("__name__", ""))
        seen.add(id(variables))
        if module is not None:
            every = id(variables) in whole
            for name, value in {**dict.fromkeys(_names_set(variables["__name__"]), MISSING), **variables}.items():
                if name in names or (every and not name.startswith("__")):
                    yield f"{module}:{name}", value
                if name in names and isinstance(value, ModuleType):
                    todo.append(vars(value))


def _imported_by(function: FunctionType) -> list[ModuleType]:
    """Returns modules that a function may import itself."""
    package = function.__globals__.get("__package__") or ""
    homes = [f"{package.rsplit('.', up)[0]}." for up in range(package.count(".") + 1)]  # of relative imports
    names = (home + name for home in ("", *homes) for name in names_in(function.__code__))
    return [module for module in map(sys.modules.get, names) if isinstance(module, ModuleType)]


def set_variables(values: Mapping[str, Any], *, in_place: bool) -> None:
    """Sets variables of packs in this process; lists and dicts `in_place`, as other modules may have imported them."""
    for place, value in values.items():
        current = variable(place) if in_place else MISSING
        if type(current) is type(value) is dict:
            current.clear()
            current.update(value)
        elif type(current) is type(value) is list:
            current[:] = value
        else:
            owner, name = _owner(place)
            if value is MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)


def variable(place: str) -> Any:
    """Returns a global variable of a pack's module, or an attribute of a class there; MISSING for none."""
    owner, name = _owner(place)
    return getattr(owner, name, MISSING)


def _owner(place: str) -> tuple[Any, str]:
    """Returns the module or class that has a variable, and its name there."""
    module, _, path = place.rpartition(":")
    *owners, name = path.split(".")
    owner: Any = code_names.pack_module(module)
    for each in owners:
        owner = getattr(owner, each, MISSING)
    return owner, name


def changed_variables(before: Variables) -> Variables:
    """Returns those of these variables that have other plain values by now."""
    now = {place: variable(place) for place in before}
    return {
        place: value
        for place, value in now.items()
        if not _is_same(value, before[place]) and _items(value) <= MOST_ITEMS
    }


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
        elif not code_names.is_of_a_pack(value):
            todo += [value.__wrapped__] if isinstance(value, FunctionType) and hasattr(value, "__wrapped__") else []
        elif isinstance(value, FunctionType):
            yield value
            todo += [*_closure_values(value), *(part for _, part in _globals_of(value))]
        elif isinstance(value, type):
            yield value
            todo += [part for base in value.__mro__ for part in vars(base).values()]
        else:
            todo += [type(value), *getattr(value, "__dict__", {}).values()]


def reads(code: Iterable[FunctionType | type]) -> Callable[[str], bool]:
    """Returns whether a function among this code may read an attribute of a name: one of those in it, or any where it
    computes names."""
    codes = [one.__code__ for one in code if isinstance(one, FunctionType)]
    names, computes = frozenset[str]().union(*map(names_in, codes)), any(map(read_by_computed_names, codes))
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
        value = code_names.attribute(value, path) if path else value
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


def check_states(wanted: dict[str, str]) -> dict[str, str]:
    """Returns these states of this worker. Raises Refused with the names of those that have been others from the first
    than they are in ComfyUI's process now."""
    now = {name: state(variable(name)) for name in wanted}
    if other := [name for name in wanted if _first.setdefault(name, now[name]) != wanted[name]]:
        raise _differ(other)
    return now


def changed_states(before: dict[str, str]) -> list[str]:
    """Says which of these a run has changed here, where ComfyUI's process does not see it."""
    changed = [name for name, was in before.items() if state(variable(name)) != was]
    return [str(_differ(changed))] if changed else []


def note_unequal(states: Iterable[str], error: Refused) -> None:
    """Remembers which of these the workers have refused: they are sent from now on, if they can be."""
    unequal.update(name for name in states if short(name) in error.values["name"].split(", "))


def short(name: str) -> str:
    return name.rpartition("/")[2].strip(".:")


def _differ(names: list[str]) -> Refused:
    (pack,) = code_names.packs_named(names[0])
    return Refused("pack.state", pack=pack.rpartition("@")[0], name=", ".join(map(short, names)))


def state(value: Any) -> str:
    """Fingerprints a value, without what each process has its own of, and no latent depends on."""
    served = [code_names.attribute(sys.modules.get(module), name) for module, name in SERVED]
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
        return code_names.qualified_name(value)
    if code_names.is_of_a_pack(type(value)) or code_names.is_comfyui(value) or isinstance(value, (*CONTAINERS, *OPEN)):
        return ""
    text = repr(value)
    if hasattr(type(value), "__next__") and text.startswith("<"):  # a generator or open file: who knows where it is
        return str(os.getpid())
    return "" if text.startswith("<") or " at 0x" in text else text  # which differ in each process


def _inside(value: Any) -> Iterable[Any]:
    """Returns the parts that a value is compared by, besides those of a set."""
    if isinstance(value, type | ModelPatcher) or (code_names.is_comfyui(value) and isinstance(value, nn.Module)):
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
    own = attributes_of(value).items() if isinstance(value, OPEN) or code_names.is_of_a_pack(type(value)) else ()
    return [*items, *own]


def _kept(function: Any) -> list[Any]:
    """Returns what a function's cache has, if another process would not compute the same."""
    if not (kept := function.cache_info().currsize):
        return []
    if not signature(function).parameters:  # one object, which code may change
        value = function()
        return [value] if isinstance(value, (*CONTAINERS, *OPEN)) or code_names.is_of_a_pack(type(value)) else []
    used = (one.__code__ for one in reached([function]) if isinstance(one, FunctionType))
    return [kept] if any(names_in(code) & CHANGING for code in used) else []


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Returns the names of global variables and attributes in this code and in functions that it defines."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    texts = code.co_consts if BY_TEXT.intersection(code.co_names) else ()
    return frozenset(code.co_names).union(*inner, (text for text in texts if isinstance(text, str)))


@cache
def read_by_computed_names(code: CodeType) -> frozenset[str]:
    """Returns the (dotted) names of what this code, or a function that it defines, reads by other names than texts in
    it: "" for its own module."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in UNSEEN]
    letters, found = "".join(map(_letter, steps)), set()
    for place, letter in enumerate(letters):
        if letter.isupper() and not _reads_by_a_text(letters, place):
            first = place + 1
            if letter == "D":
                first = len(letters[:place].rstrip("a")) - 1
            last = first + 1
            while letters[last : last + 1] == "a":
                last += 1
            found.add("" if letter in "BE" else ".".join(str(step.argval) for step in steps[first:last]))
    inner = (read_by_computed_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(found).union(*inner)


def _reads_by_a_text(steps: str, place: int) -> bool:
    """Is what is read there named by a text in the code (t)? Other steps are a: an attribute, l: another load, c: a
    call, b: `[]`. What `self` has is compared anyway."""
    reads, after = steps[place], steps[place + 1 :]
    if (reads == "V" and after.startswith("sc")) or (reads == "D" and steps[:place].endswith("s")):
        return True
    after = after.lstrip({"G": "lsa", "V": "la"}.get(reads, ""))
    if reads in "VB" and after.startswith("c"):  # then `[TEXT]` or `.get(TEXT)`
        after = after[1:].removeprefix("g")
    after = after.removeprefix("g") if reads == "D" else after
    ends = after[1:2] in ("b", "c") or (after[1:2] in ("l", "t", "o", "s") and after[2:3] == "c")
    return reads != "E" and after.startswith("t") and ends


def _letter(step: dis.Instruction) -> str:
    if step.opname == "LOAD_CONST":
        return "t" if isinstance(step.argval, str) else "o"
    if step.opname.startswith("LOAD_"):
        return BY_NAME.get(str(step.argval), "a" if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else "l")
    return "c" if step.opname.startswith("CALL") else "b" if step.opname == "BINARY_SUBSCR" else "o"


@cache
def _names_set(module: str) -> frozenset[str]:
    """Returns the names that a module has once it is imported: a node may delete one."""
    steps = [step for code in code_names.source_code(sys.modules[module]) for step in dis.get_instructions(code)]
    stored, deleted = ({step.argval for step in steps if step.opname == name} for name in ("STORE_NAME", "DELETE_NAME"))
    return frozenset(stored - deleted)
