"""Finds code that other packs put onto a network itself, or in place of ComfyUI's own code: workers would lack it."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...parallel_runtime.errors import Refused, Sentence, say
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, qualified_name

CUSTOM_NODES = f"{os.sep}custom_nodes{os.sep}"
OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
OWNERS = ("comfy", "comfy_extras", "torch")  # packages whose code workers have
GGUF_LAYER = "GGMLLayer"  # of ComfyUI-GGUF
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
NETWORKS = ("comfy.ldm.", "comfy.ops")  # modules whose code is in networks
LOOP = (  # modules, and packages, whose code the workers run around the network
    "comfy.conds", "comfy.context_windows", "comfy.extra_samplers.", "comfy.hooks", "comfy.k_diffusion.",
    "comfy.latent_formats", "comfy.model_base", "comfy.model_sampling", "comfy.patcher_extension",
    "comfy.sampler_helpers", "comfy.samplers",
)  # fmt: skip
IN_COMFYUI = {"KSampler", "sample", "ksampler", "sampler_object", "calculate_sigmas"}  # run in ComfyUI's process alone
MERGES = ("comfy.lora", "comfy.weight_adapter.")
GLIGEN = ("comfy.gligen",)
ATTENTION = ("optimized_attention", "optimized_attention_masked")  # modules of networks import ComfyUI's choice so
CHOSEN_ATTENTION = comfy.ldm.modules.attention.optimized_attention  # before a node has set another, as packs' do


def check_loop() -> None:
    """Raises Unsendable for a function, method or class of ComfyUI's sampling loop that another pack has replaced."""
    for name, code in _replaced(_loaded(LOOP)):
        own = name.removeprefix("comfy.samplers.").partition(".")[0]
        if own not in IN_COMFYUI and not own.endswith("_scheduler"):
            raise Unsendable("unsendable.code", name=name, code=code)


def check_code(modules: tuple[str, ...]) -> None:
    """Raises Unsendable for code of these modules that another pack has replaced."""
    for name, code in _replaced(_loaded(modules)):
        raise Unsendable("unsendable.code", name=name, code=code)


def why_replaced(model: ModelPatcher) -> Sentence | None:
    """Returns what another pack has replaced, if anything, of the code that this MODEL's network runs, or that merges
    its patches."""
    replaced = [
        *_replaced_in_networks(model.model.diffusion_model),
        *(_replaced(_loaded(MERGES)) if model.patches else ()),
    ]
    return say("unsendable.code", name=replaced[0][0], code=replaced[0][1]) if replaced else None


def check_model(model: ModelPatcher, *, of_pack: bool) -> None:
    """Raises Refused for a MODEL of another pack's class, unless workers have it too (`of_pack`), and for methods that
    another pack has put onto it or onto ComfyUI's model around the network."""
    if not of_pack and _is_of_a_pack(type(model)):
        raise Refused("network.changed", what="the MODEL's class", code=_name_in_pack(type(model)))
    for owner in (model, model.model):
        for what, code in _methods_on(owner, type(owner).__name__):
            raise Refused("network.changed", what=what, code=code)


def check_layers(network: nn.Module) -> None:
    """Raises Refused for a layer of another pack's class."""
    for name, code in foreign_layers(network):
        raise Refused("network.changed", what=name, code=code)


def layers_of_packs(network: nn.Module) -> list[str]:
    """Returns the first class of other packs' layers, if any, that may not compute each token by itself; those of
    ComfyUI-GGUF do."""
    kinds = dict.fromkeys(type(module) for module in network.modules())
    foreign = (kind for kind in kinds if _is_of_a_pack(kind))
    each_token = {kind for kind in kinds if GGUF_LAYER in [base.__name__ for base in kind.__mro__]}
    return [_name_in_pack(kind) for kind in foreign if kind not in each_token][:1]


def _patched_now(network: nn.Module) -> set[str]:
    """Returns what the MODEL that ComfyUI has loaded now replaces in this network: the next one puts it back."""
    loaded = (one.model for one in comfy.model_management.current_loaded_models)
    patchers = [one for one in loaded if one is not None and getattr(one.model, "diffusion_model", None) is network]
    names = {name.removeprefix("diffusion_model.") for one in patchers for name in one.object_patches_backup}
    return {name if "." in name else f"{type(network).__name__}.{name}" for name in names} | names


def check_network(network: nn.Module) -> None:
    """Raises Refused for what `changes_of` yields."""
    for name, code in changes_of(network):
        raise Refused("network.changed", what=name, code=code)


def check_module(module: nn.Module, name: str) -> None:
    """Raises Refused for a method or hook on this module itself, without its children."""
    for what, code in _changes_on(module, name):
        raise Refused("network.changed", what=what, code=code)


def foreign_layers(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the layers of other packs' classes, each with its class."""
    patched = _patched_now(network)
    for name, module in network.named_modules():
        if _is_of_a_pack(type(module)) and name not in patched:
            yield name or "the network", _name_in_pack(type(module))


def changes_of(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields methods and hooks that the network's own class does not have, and what other packs have replaced of the
    code of all networks, each with that pack's name for it. Takes 2 us for each module."""
    patched = _patched_now(network)
    for name, module in network.named_modules():
        yield from _changes_on(module, name or type(network).__name__, patched)
    yield from _replaced_in_networks(network)


def _changes_on(module: nn.Module, name: str, patched: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    yield from _methods_on(module, name, patched)
    for hook in (hook for hooks in HOOKS for hook in vars(module)[hooks].values()):
        if _is_foreign(hook):
            yield f"a hook on {name}", _name_in_pack(hook)


def _methods_on(owner: object, name: str, patched: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields methods of an object that its class does not have, but for those in `patched`."""
    kind: Any = type(owner)
    for method in vars(owner).keys() & _methods(kind):
        value = vars(owner)[method]
        put_back = value == MethodType(getattr(kind, method), owner)  # the class's own, by ComfyUI as it unpatched
        if _is_foreign(value) and not put_back and f"{name}.{method}" not in patched:
            yield f"{name}.{method}", _name_in_pack(value)


def _replaced_in_networks(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields what other packs have replaced of ComfyUI's and torch's code that this network runs."""
    kinds = {type(module) for module in network.modules()}
    for base in {base for kind in kinds for base in kind.__mro__} | {torch.Tensor}:
        for name, code in _replaced_methods(base):
            yield f"{base.__module__}.{base.__qualname__}.{name}", _name_in_pack(code)
    modules = [*_modules_of(kinds)]
    yield from _replaced(modules, classes=False)
    for module, name in itertools.product(modules, ATTENTION):
        attention = vars(module).get(name, CHOSEN_ATTENTION)
        if is_comfyui(attention) and attention is not CHOSEN_ATTENTION:
            yield f"{module.__name__}.{name}", qualified_name(attention)
    for module, names in ((torch, _torch_functions()), (nn.functional, _own_names(nn.functional))):
        for name in names:
            if _replaces(vars(module).get(name), module.__name__, name):
                yield f"{module.__name__}.{name}", _name_in_pack(vars(module)[name])
    attention = nn.functional.scaled_dot_product_attention
    if attention is not torch._C._nn.scaled_dot_product_attention and not _is_of_a_pack(attention):
        yield "torch.nn.functional.scaled_dot_product_attention", qualified_name(attention)  # a library's, by a pack


@functools.cache
def _torch_functions() -> tuple[str, ...]:
    """Returns the names of torch's functions of tensors."""
    return (*dir(torch._C._VariableFunctions), *torch.functional.__all__)


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    """Returns the names of a class's methods, without the one that only says how many rows ComfyUI batches."""
    names = (name for name in dir(kind) if inspect.isfunction(inspect.getattr_static(kind, name)))
    return frozenset(names) - {"memory_required"}


def _replaced_methods(base: type) -> Iterator[tuple[str, Any]]:
    """Yields the methods that another pack has replaced in a class of ComfyUI's or torch's."""
    if base.__module__.partition(".")[0] in OWNERS:
        owner = f"{base.__module__}.{base.__qualname__}"
        for name, value in vars(base).items():
            if _replaces(value, owner, name):
                yield name, value


def _replaced(modules: Iterable[ModuleType], *, classes: bool = True) -> Iterator[tuple[str, str]]:
    """Yields `module.name` of what another pack has replaced there, with that pack's name for it. What it has added
    under a name of its own replaces nothing."""
    for module in modules:
        for name in _own_names(module):
            value = vars(module).get(name)
            if _replaces(value, module.__name__, name):
                yield f"{module.__name__}.{name}", _name_in_pack(value)
            elif classes and isinstance(value, type) and value.__module__ == module.__name__:
                for method, code in (found for base in value.__mro__ for found in _replaced_methods(base)):
                    yield f"{module.__name__}.{name}.{method}", _name_in_pack(code)


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
    loader: Any = getattr(module.__spec__, "loader", None)
    code = loader.get_code(module.__name__) if hasattr(loader, "get_code") else None
    return code.co_names if isinstance(code, CodeType) else ()


def _is_foreign(value: Any) -> bool:
    return not is_comfyui(value) or _is_of_a_pack(value)


def _is_of_a_pack(value: Any) -> bool:
    """Is this function or class made by a file of a custom node pack? functools.wraps does not hide that."""
    file = _file(value)
    return CUSTOM_NODES in file and not file.startswith(OURS)


def _replaces(value: Any, owner: str, name: str) -> bool:
    """Is `value`, under the name `owner.name`, of a pack, and more than a passage to what had that name?"""
    return _is_of_a_pack(value) and not _passes_on(value, f"{owner}.{name}")


def _passes_on(function: Any, original: str) -> bool:
    """Does a pack's function nothing but call the function that is named `original` with its own arguments, and return
    the result? It may keep arguments in a class of the pack, as ComfyUI-Easy-Use does from its import on: only code of
    that pack reads them, and no worker has any."""
    definition = _definition(function.__code__) if isinstance(function, FunctionType) else None
    match definition:
        case ast.FunctionDef(body=[*steps, ast.Return(value=ast.Call(func=ast.Name(id=called)) as call)]):
            inner = _variable(function, called)
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
    if _is_of_a_pack(inner):
        return _passes_on(inner, original)
    return f"{inner.__module__}.{inner.__qualname__}" == original


def _keeps(step: ast.stmt, function: FunctionType) -> bool:
    """Is this a docstring, or does it keep an argument in a class of a pack?"""
    match step:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner))], value=ast.Name()):
            kind = None if owner in function.__code__.co_varnames else _variable(function, owner)
            return isinstance(kind, type) and _is_of_a_pack(kind)
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


def _variable(function: FunctionType, name: str) -> Any:
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return closure[name].cell_contents if name in closure else function.__globals__.get(name)


def _parameters(function: FunctionType) -> list[inspect.Parameter]:
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return [one.replace(annotation=one.empty) for one in parameters]


def _file(value: Any) -> str:
    if not isinstance(value, FunctionType):
        value = getattr(value, "__func__", value)  # of a static method or class method
        value = getattr(value, "func", value)  # of functools.partial
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    if isinstance(value, type):
        return getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return ""


def _name_in_pack(value: Any) -> str:
    """Returns a name of the pack's own, where functools.wraps gave a function that of ComfyUI's or torch's."""
    if _is_of_a_pack(value) and (value.__module__ or "").partition(".")[0] in OWNERS:
        return _file(value).rpartition(CUSTOM_NODES)[2]
    return qualified_name(value)
