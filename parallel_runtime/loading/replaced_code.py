"""Finds what packs have replaced of ComfyUI's and torch's own code. Workers, which import the same packs, have to have
it replaced alike; a pack's function that only calls the original replaces nothing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import comfy.ldm.modules.attention
import comfy.ops
import torch
from torch import nn

from ..errors import Refused, Sentence, say
from . import code_names
from .fingerprint import code_fingerprint, fingerprint
from .pack_states import state

CUSTOM_NODES = f"{os.sep}custom_nodes{os.sep}"
OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
OWNERS = ("comfy", "comfy_extras", "torch")  # packages whose code workers have
NETWORKS = ("comfy.ldm.", "comfy.ops", "comfy.quant_ops", "comfy.rmsnorm")  # modules whose code is in networks
LOOP = (  # modules, and packages, whose code the workers run around the network
    "comfy.conds", "comfy.context_windows", "comfy.extra_samplers.", "comfy.hooks", "comfy.k_diffusion.",
    "comfy.latent_formats", "comfy.model_base", "comfy.model_sampling", "comfy.patcher_extension",
    "comfy.sampler_helpers", "comfy.samplers",
)  # fmt: skip
IN_COMFYUI = {"KSampler", "sample", "ksampler", "sampler_object", "calculate_sigmas"}  # run in ComfyUI's process alone
MERGES = ("comfy.lora", "comfy.weight_adapter.")
GLIGEN = ("comfy.gligen",)
ATTENTION = ("optimized_attention", "optimized_attention_masked")  # modules of networks import ComfyUI's choice so
TORCH_FUNCTIONS = (*dir(torch._C._VariableFunctions), *torch.functional.__all__)  # of tensors
refused_with: dict[str, dict[str, list[str]]] = {}  # in ComfyUI's process, by PACK@FINGERPRINT: `note_refused`
VALUES = bool | int | float | complex | str | bytes | torch.dtype | torch.device | None


@dataclass(frozen=True)
class Replaced:
    """Code of a pack under the `name` of ComfyUI's or torch's."""

    name: str
    code: Any

    @property
    def by(self) -> str:
        return name_in_pack(self.code)

    @property
    def merges(self) -> bool:
        """Does it merge patches into weights?"""
        return self.name.startswith(MERGES)

    @functools.cached_property
    def packs(self) -> list[str]:
        """PACK@FINGERPRINT of each whose files the code is from."""
        return list(
            dict.fromkeys(pack for module, _ in _parts(self.code, set()) for pack in code_names.packs_named(module))
        )

    @property
    def why_unsendable(self) -> Sentence | None:
        """Says why workers cannot have this code, None where they can."""
        names = {"name": self.name, "code": self.by}
        try:
            reason = next((code_names.unusable[pack] for pack in self.packs if pack in code_names.unusable), "")
        except Refused as changed:
            reason = changed.sentence
        if reason:
            return say("unsendable.replaced", **names, reason=reason)
        return None if self.packs else say("unsendable.code", **names)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same text in each process where the same files have made the code alike."""
        return fingerprint(*(text for part in _parts(self.code, set()) for text in part))[:16]


def replaced_code(networks: Iterable[nn.Module], *, merging: bool, loop: bool = True) -> list[Replaced]:
    """Returns what is replaced of the code of these networks, of that which merges patches into them if `merging`, and
    of the sampling loop if `loop`."""
    inside = (one for network in networks for one in replaced_in_network(network))
    return [*(replaced_in_loop() if loop else ()), *inside, *(replaced_in(MERGES) if merging else ())]


def check_replaced(wanted: dict[str, list[str]], found: list[Replaced]) -> None:
    """Raises Refused where not the same is replaced in this process, `found`, as in ComfyUI's: `wanted` has for each
    name the fingerprint and a pack."""
    here = {one.name: one for one in found}
    for name in sorted(wanted.keys() | here.keys()):
        if name not in here or name not in wanted or wanted[name][0] != here[name].fingerprint:
            if name in here:
                _, pack = code_names.pack_of(code_names.home_of(here[name].code)) or ("", "")
            else:
                pack = wanted[name][1]
            raise Refused("pack.replaces", pack=pack.partition("@")[0], name=name)


def note_refused(names: Iterable[str], replaced: dict[str, list[str]], error: Refused) -> None:
    """Remembers what is `replaced` here, by the words of `check_replaced`, as workers refuse one of these packs."""
    refused_with.update({pack: replaced for pack in names if pack.rpartition("@")[0] == error.values["pack"]})


def forget_put_back() -> None:
    """Has packs tried again that workers have refused, once other code is replaced here than then."""
    now = {one.name: one for one in replaced_in_loop()} if refused_with else {}
    for pack, then in [*refused_with.items()]:
        found = now | {name: Replaced(name, pkgutil.resolve_name(name)) for name in then.keys() - now.keys()}
        if {name: [one.fingerprint, *one.packs] for name, one in found.items()} != then:
            del refused_with[pack]
            code_names.unusable.pop(pack, None)


def replaced_in_loop() -> list[Replaced]:
    """Finds functions, methods and classes of ComfyUI's sampling loop that a pack has replaced."""
    found = []
    for one in replaced_in(LOOP):
        own = one.name.removeprefix("comfy.samplers.").partition(".")[0]
        if own not in IN_COMFYUI and not own.endswith("_scheduler"):
            found.append(one)
    return found


def replaced_in(modules: tuple[str, ...]) -> list[Replaced]:
    """Finds code of these modules that a pack has replaced."""
    return list(_replaced(_loaded(modules)))


def replaced_in_network(network: nn.Module) -> Iterator[Replaced]:
    """Yields what packs have replaced of ComfyUI's and torch's code that this network runs."""
    kinds = {type(module) for module in network.modules()}
    for base in {base for kind in kinds for base in kind.__mro__} | {torch.Tensor}:
        yield from _replaced_methods(base)
    modules = [*_modules_of(kinds)]
    yield from _replaced(modules, classes=False)
    for kind in (kind for kind in vars(comfy.ops).values() if isinstance(kind, type)):  # which have layers in them
        yield from _replaced_methods(kind)
    for module, name in itertools.product(modules, ATTENTION):
        attention = _value(module, name) or CHOSEN_ATTENTION
        if code_names.is_comfyui(attention) and attention is not CHOSEN_ATTENTION:
            yield Replaced(f"{module.__name__}.{name}", attention)
    for module, names in ((torch, TORCH_FUNCTIONS), (nn.functional, _own_names(nn.functional))):
        for name in names:
            if _replaces(vars(module).get(name), module.__name__, name):
                yield Replaced(f"{module.__name__}.{name}", vars(module)[name])
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):  # those on all modules of this process
        hooks = vars(torch.nn.modules.module)[name].values()
        yield from (Replaced(f"torch.nn.modules.module.{name}", hook) for hook in hooks)
    attention = nn.functional.scaled_dot_product_attention
    if attention is not torch._C._nn.scaled_dot_product_attention and not is_in_a_pack(attention):
        yield Replaced("torch.nn.functional.scaled_dot_product_attention", attention)  # a library's, by a pack


def _parts(value: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yields what a function, class or object consists of: the reference of a pack's module, "" for others, and a text
    of what is there."""
    if isinstance(value, VALUES):
        yield "", repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, FunctionType):
        yield _module(value), f"{value.__code__.co_qualname} {code_fingerprint(value.__code__)}"
        inside += (value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ()))
    elif isinstance(value, CellType):
        inside += [] if value == CellType() else [value.cell_contents]
    elif isinstance(value, type):
        yield _module(value), value.__qualname__
        inside += value.__bases__ if is_in_a_pack(value) else ()
    elif isinstance(value, list | tuple | dict):
        yield "", f"{type(value).__name__} of {len(value)}"
        inside += value.items() if isinstance(value, dict) else value
    elif isinstance(value, ModuleType):
        yield "", value.__name__
    else:
        yield _module(value), f"{type(value).__qualname__} {state(value) if is_in_a_pack(type(value)) else ''}"
        inside += (getattr(value, name, None) for name in ("__func__", "func", "args", "keywords"))
    for part in inside:
        yield from _parts(part, seen)


def _module(value: Any) -> str:
    return code_names.pack_reference(code_names.home_of(value)) or ""


def _chosen_attention() -> Any:
    """Returns what ComfyUI chose as it started: most modules of networks have it, though a pack that was imported
    before us may have set another in some."""
    chosen = (vars(module).get(ATTENTION[0]) for module in [comfy.ldm.modules.attention, *_loaded(NETWORKS)])
    return Counter(filter(code_names.is_comfyui, chosen)).most_common(1)[0][0]


def _replaced_methods(base: type) -> Iterator[Replaced]:
    """Yields the methods that a pack has replaced in a class of ComfyUI's or torch's."""
    if base.__module__.partition(".")[0] in OWNERS:
        owner = f"{base.__module__}.{base.__qualname__}"
        for name, value in vars(base).items():
            if _replaces(value, owner, name):
                yield Replaced(f"{owner}.{name}", value)


def _replaced(modules: Iterable[ModuleType], *, classes: bool = True) -> Iterator[Replaced]:
    """Yields what packs have replaced in these modules. What they have added under a name of their own replaces
    nothing."""
    for module in modules:
        for name in _own_names(module):
            value = _value(module, name)
            if _replaces(value, module.__name__, name):
                yield Replaced(f"{module.__name__}.{name}", value)
            elif classes and isinstance(value, type) and value.__module__ == module.__name__:
                for base in value.__mro__:
                    yield from _replaced_methods(base)


def _value(module: ModuleType, name: str) -> Any:
    """Returns what a module has under this name, without what we have wrapped it in while a network is split."""
    value = vars(module).get(name)
    return getattr(value, "__wrapped__", value) if _file(value).startswith(OURS) else value


def _loaded(names: tuple[str, ...]) -> list[ModuleType]:
    """Returns the modules of these names, and of packages whose names end with a dot, as far as they are imported."""
    packages = tuple(name for name in names if name.endswith("."))
    return [module for name, module in [*sys.modules.items()] if name in names or name.startswith(packages)]


def _modules_of(kinds: Iterable[type]) -> Iterator[ModuleType]:
    """Yields ComfyUI's modules of networks that define these classes, and those whose code these use."""
    names = [kind.__module__ for kind in kinds]
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name.startswith(NETWORKS) and name not in seen and name in sys.modules:
            seen.add(name)
            yield sys.modules[name]
            values = (vars(sys.modules[name]).get(own) for own in _own_names(sys.modules[name]))
            names += [value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
                      for value in values]  # fmt: skip


@functools.cache
def _own_names(module: ModuleType) -> tuple[str, ...]:
    """Returns the names that the module's own source defines or imports."""
    return tuple(name for code in code_names.source_code(module) for name in code.co_names)


def is_in_a_pack(value: Any) -> bool:
    """Is this function or class made by a file of a custom node pack? functools.wraps does not hide that."""
    file = _file(value)
    return CUSTOM_NODES in file and not file.startswith(OURS)


def _replaces(value: Any, owner: str, name: str) -> bool:
    """Is `value`, under the name `owner.name`, of a pack, of no file, another class's `forward`, or what had that name
    with other arguments? It is not if it only passes on."""
    if isinstance(value, functools.partial):
        return is_in_a_pack(value) or getattr(value.func, "__name__", "") == name
    if isinstance(value, FunctionType):
        made = value.__code__.co_qualname
        if value.__code__.co_filename == "<string>" and not name.startswith("_"):  # such as dataclasses make
            return True
        if (
            name == "forward"
            and made.endswith(".forward")
            and code_names.LOCAL not in made
            and not f".{owner}.forward".endswith(f".{made}")
        ):
            return True
    return is_in_a_pack(value) and not _passes_on(value, f"{owner}.{name}")


def _passes_on(function: Any, original: str) -> bool:
    """Does a pack's function nothing but call the function that is named `original` with its own arguments, and return
    the result? It may keep arguments in a class of the pack, as ComfyUI-Easy-Use does from its import on: only code of
    that pack reads them, and no worker has any."""
    definition = _definition(function.__code__) if isinstance(function, FunctionType) else None
    match definition:
        case ast.FunctionDef(body=[*steps, ast.Return(value=ast.Call(func=ast.Name(id=called)) as call)]):
            inner = variable(function, called)
        case _:
            return False
    if not isinstance(inner, FunctionType) or not all(_keeps(step, function) for step in steps):
        return False
    own, others = _parameters(function), _parameters(inner)
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    named = [one for one in own if one.kind not in stars]
    if own != others and (len(own) != len(named) + len(stars) or named != others[: len(named)]):
        return False
    given = [ast.unparse(one) for one in call.args]
    given += [ast.unparse(one).removeprefix(f"{ast.unparse(one.value)}=") for one in call.keywords]
    if given != [f"{stars.get(one.kind, '')}{one.name}" for one in own]:
        return False
    if is_in_a_pack(inner):
        return _passes_on(inner, original)
    return f"{inner.__module__}.{inner.__qualname__}" == original


def _keeps(step: ast.stmt, function: FunctionType) -> bool:
    """Is this a docstring, or does it keep an argument in a class of a pack?"""
    match step:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner))], value=ast.Name()):
            kind = None if owner in function.__code__.co_varnames else variable(function, owner)
            return isinstance(kind, type) and is_in_a_pack(kind)
    return False


@functools.cache
def _definition(code: CodeType) -> ast.FunctionDef | None:
    """Returns the source of a function; None where its file does not have it, or no longer."""
    try:
        source = Path(code.co_filename).read_text(encoding="utf-8")
        module = compile(source, code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None
    if code not in _codes_in(module):
        return None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first_line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first_line == code.co_firstlineno:
                return node
    return None


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes_in(inner)


def variable(function: FunctionType, name: str) -> Any:
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return closure[name].cell_contents if name in closure else function.__globals__.get(name)


def _parameters(function: FunctionType) -> list[inspect.Parameter]:
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return [one.replace(annotation=one.empty) for one in parameters]


def _file(value: Any) -> str:
    """Returns the file of a function, of the one that a decorator of torch's or ComfyUI's has around it, or of a class,
    also an object's."""
    if not isinstance(value, FunctionType):
        value = getattr(value, "__func__", value)  # of a static method or class method
        value = getattr(value, "func", value)  # of functools.partial
    if isinstance(value, FunctionType):
        file, inner = value.__code__.co_filename, getattr(value, "__wrapped__", None)
        return file if inner is None or CUSTOM_NODES in file or file.startswith(OURS) else _file(inner)
    kind = value if isinstance(value, type) else type(value)
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def name_in_pack(value: Any) -> str:
    """Returns a name of the pack's own, where functools.wraps gave a function that of ComfyUI's or torch's, also of a
    method that is made of a functools.partial."""
    while not hasattr(value, "__qualname__") and isinstance(value, MethodType | functools.partial):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if is_in_a_pack(value) and (value.__module__ or "").partition(".")[0] in OWNERS:
        return _file(value).rpartition(CUSTOM_NODES)[2]
    return code_names.qualified_name(value)


CHOSEN_ATTENTION = _chosen_attention()  # in a worker, before it imports a pack
