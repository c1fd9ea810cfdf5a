"""Finds code that other packs put onto a network itself, or in place of ComfyUI's own code: workers would lack it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import comfy.model_management
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, qualified_name

CUSTOM_NODES = f"{os.sep}custom_nodes{os.sep}"
OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
NETWORKS = "comfy.ldm."
LOOP = (  # modules, and packages, whose code the workers run around the network
    "comfy.conds", "comfy.context_windows", "comfy.extra_samplers.", "comfy.hooks", "comfy.k_diffusion.",
    "comfy.latent_formats", "comfy.model_base", "comfy.model_sampling", "comfy.patcher_extension",
    "comfy.sampler_helpers", "comfy.samplers",
)  # fmt: skip
IN_COMFYUI = {"KSampler", "sample", "ksampler", "sampler_object", "calculate_sigmas"}  # run in ComfyUI's process alone
MERGES = ("comfy.lora", "comfy.weight_adapter.")


def check_loop() -> None:
    """Raises Unsendable for a function, method or class of ComfyUI's sampling loop that another pack has replaced."""
    for name, code in _replaced(_loaded(LOOP)):
        own = name.removeprefix("comfy.samplers.").partition(".")[0]
        if own not in IN_COMFYUI and not own.endswith("_scheduler"):
            raise Unsendable("unsendable.code", name=name, code=code)


def check_merging() -> None:
    """Raises Unsendable for code of ComfyUI's that merges patches into weights, where another pack has replaced it."""
    for name, code in _replaced(_loaded(MERGES)):
        raise Unsendable("unsendable.code", name=name, code=code)


def check_model(model: ModelPatcher) -> None:
    """Raises Refused for a MODEL of another pack's class, and for methods that another pack has put onto it or onto
    ComfyUI's model around the network."""
    if _is_of_a_pack(type(model)):
        _refuse("the MODEL's class", type(model))
    for owner in (model, model.model):
        _check_methods(owner, type(owner).__name__)


def check_layers(network: nn.Module) -> None:
    """Raises Refused for a layer of another pack's class."""
    patched = _patched_now(network)
    for name, module in network.named_modules():
        if _is_of_a_pack(type(module)) and name not in patched:
            _refuse(name or "the network", type(module))


def _patched_now(network: nn.Module) -> set[str]:
    """Returns what the MODEL that ComfyUI has loaded now replaces in this network: the next one puts it back."""
    loaded = (one.model for one in comfy.model_management.current_loaded_models)
    patchers = [one for one in loaded if one is not None and getattr(one.model, "diffusion_model", None) is network]
    names = {name.removeprefix("diffusion_model.") for one in patchers for name in one.object_patches_backup}
    return {name if "." in name else f"{type(network).__name__}.{name}" for name in names} | names


def check_network(network: nn.Module) -> None:
    """Raises Refused for a method or hook that the network's own class does not have, and for a function of the
    network's code that another pack has replaced. Takes 2 us for each module."""
    kinds, patched = set(), _patched_now(network)
    for name, module in network.named_modules():
        kinds.add(type(module))
        check_module(module, name or type(network).__name__, patched)
    for kind in kinds:
        for name, code in _replaced_methods(kind):
            _refuse(f"{kind.__qualname__}.{name} of all networks", code)
    for name, code in _replaced(_modules_of(kinds), classes=False):
        raise Refused("network.changed", what=name, code=code)


def check_module(module: nn.Module, name: str, patched: Collection[str] = ()) -> None:
    """Raises Refused for a method or hook on this module itself, without its children, but for those in `patched`."""
    _check_methods(module, name, patched)
    for hook in (hook for hooks in HOOKS for hook in vars(module)[hooks].values()):
        if _is_foreign(hook):
            _refuse(f"a hook on {name}", hook)


def _check_methods(owner: object, name: str, patched: Collection[str] = ()) -> None:
    kind: Any = type(owner)
    for method in vars(owner).keys() & _methods(kind):
        value = vars(owner)[method]
        put_back = value == MethodType(getattr(kind, method), owner)  # the class's own, by ComfyUI as it unpatched
        if _is_foreign(value) and not put_back and f"{name}.{method}" not in patched:
            _refuse(f"{name}.{method}", vars(owner)[method])


def _refuse(what: str, code: Any) -> None:
    raise Refused("network.changed", what=what, code=_name_in_pack(code))


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    """Returns the names of a class's methods, without the one that only says how many rows ComfyUI batches."""
    names = (name for name in dir(kind) if inspect.isfunction(inspect.getattr_static(kind, name)))
    return frozenset(names) - {"memory_required"}


def _replaced_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the methods of `kind` that another pack has replaced in the class."""
    for base in kind.__mro__:
        if is_comfyui(base):
            for name, value in vars(base).items():
                if _is_of_a_pack(value):
                    yield name, value


def _replaced(modules: Iterable[ModuleType], *, classes: bool = True) -> Iterator[tuple[str, str]]:
    """Yields `module.name` of what another pack has replaced there, with that pack's name for it. What it has added
    under a name of its own replaces nothing."""
    for module in modules:
        for name in _own_names(module):
            value = vars(module).get(name)
            if _is_of_a_pack(value):
                yield f"{module.__name__}.{name}", _name_in_pack(value)
            elif classes and isinstance(value, type) and value.__module__ == module.__name__:
                for method, code in _replaced_methods(value):
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


def _file(value: Any) -> str:
    value = getattr(value, "__func__", value)  # of a static method or class method
    value = getattr(value, "func", value)  # of functools.partial
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    if isinstance(value, type):
        return getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return ""


def _name_in_pack(value: Any) -> str:
    """Returns a name of the pack's own, where functools.wraps gave a function that of ComfyUI's."""
    if not is_comfyui(value):
        return qualified_name(value)
    return f"{_file(value).rpartition(CUSTOM_NODES)[2]}"
