"""Finds code that other packs put onto a network itself, or in place of ComfyUI's own code: workers would lack it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Iterator
from types import MethodType
from typing import Any

import comfy.model_management
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...parallel_runtime.errors import Refused, Sentence, say
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui
from ...parallel_runtime.loading.replaced_code import (
    MERGES,
    Replaced,
    is_in_a_pack,
    name_in_pack,
    replaced_in,
    replaced_in_network,
)

GGUF_LAYER = "GGMLLayer"  # of ComfyUI-GGUF
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_loop(replaced: Iterable[Replaced]) -> None:
    """Raises Unsendable for code of the sampling loop that packs have replaced, where workers cannot have theirs."""
    if reason := next(filter(None, (one.why_unsendable for one in replaced)), None):
        raise Unsendable(reason.key, **reason.values)


def check_code(modules: tuple[str, ...]) -> None:
    """Raises Unsendable for code of these modules that another pack has replaced."""
    for one in replaced_in(modules):
        raise Unsendable("unsendable.code", name=one.name, code=one.by)


def why_replaced(model: ModelPatcher) -> Sentence | None:
    """Returns what another pack has replaced, if anything, of the code that this MODEL's network runs, or that merges
    its patches. Workers compute with other code than ComfyUI in places, so that they would not run it alike."""
    replaced = [*replaced_in_network(model.model.diffusion_model), *(replaced_in(MERGES) if model.patches else ())]
    return say("unsendable.code", name=replaced[0].name, code=replaced[0].by) if replaced else None


def check_model(model: ModelPatcher, *, of_pack: bool) -> None:
    """Raises Refused for a MODEL of another pack's class, unless workers have it too (`of_pack`), and for methods that
    another pack has put onto it or onto ComfyUI's model around the network."""
    if not of_pack and is_in_a_pack(type(model)):
        raise Refused("network.changed", what="the MODEL's class", code=name_in_pack(type(model)))
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
    foreign = (kind for kind in kinds if is_in_a_pack(kind))
    each_token = {kind for kind in kinds if GGUF_LAYER in [base.__name__ for base in kind.__mro__]}
    return [name_in_pack(kind) for kind in foreign if kind not in each_token][:1]


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
        if is_in_a_pack(type(module)) and name not in patched:
            yield name or "the network", name_in_pack(type(module))


def changes_of(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields methods and hooks that the network's own class does not have, and what packs have replaced of the code of
    all networks, each with that pack's name for it. Takes 2 us for each module."""
    patched = _patched_now(network)
    for name, module in network.named_modules():
        if name not in patched:
            yield from _changes_on(module, name or type(network).__name__, patched)
    yield from ((one.name, one.by) for one in replaced_in_network(network))


def _changes_on(module: nn.Module, name: str, patched: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    yield from _methods_on(module, name, patched)
    for hook in (hook for hooks in HOOKS for hook in vars(module)[hooks].values()):
        if _is_foreign(hook):
            yield f"a hook on {name}", name_in_pack(hook)


def _methods_on(owner: object, name: str, patched: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields methods of an object that its class does not have, but for those in `patched`."""
    kind: Any = type(owner)
    for method in vars(owner).keys() & _methods(kind):
        value = vars(owner)[method]
        put_back = value == MethodType(getattr(kind, method), owner)  # the class's own, by ComfyUI as it unpatched
        if _is_foreign(value) and not put_back and f"{name}.{method}" not in patched:
            yield f"{name}.{method}", name_in_pack(value)


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    """Returns the names of a class's methods, without the one that only says how many rows ComfyUI batches."""
    names = (name for name in dir(kind) if inspect.isfunction(inspect.getattr_static(kind, name)))
    return frozenset(names) - {"memory_required"}


def _is_foreign(value: Any) -> bool:
    return not is_comfyui(value) or is_in_a_pack(value)
