"""Finds code that other packs put onto a network itself, or in place of ComfyUI's own code."""

import dis
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import comfy.model_management
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...parallel_runtime.architectures.block_patches import sees_each_token
from ...parallel_runtime.errors import Refused, Sentence, say
from ...parallel_runtime.loading import replaced_code
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, is_of_a_pack
from ...parallel_runtime.loading.replaced_code import Replaced, is_in_a_pack, name_in_pack
from ...parallel_runtime.request import ParallelRequest

GGUF_LAYER = "GGMLLayer"  # of ComfyUI-GGUF
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
NETWORK = "diffusion_model"
CHANGEABLE = (list, dict, set)
EVALUATE = ("comfy.conds.", "comfy.hooks.", "comfy.model_base.", "comfy.model_sampling.")  # inside evaluations
EVALUATING = {"_calc_cond_batch", "can_concat_cond", "cond_cat", "cond_equal_size", "finalize_default_conds",
              "get_area_and_mult"}  # fmt: skip
Changes = Iterable[tuple[str, Any]]  # what is changed, and the code that is there


@dataclass(frozen=True)
class CodeForGood:
    """Code of packs that a MODEL's network runs: what they have `replaced` of ComfyUI's and torch's, or of what merges
    patches, and by name what nodes have put onto parts of the network, `in_place`."""

    replaced: list[Replaced] = field(default_factory=list)
    in_place: dict[str, Any] = field(default_factory=dict)

    @property
    def inside(self) -> list[str]:
        """What is in the network itself, by its names."""
        return [*(f"{one.name} by {one.by}" for one in self.replaced if not one.merges), *self.in_place]

    @property
    def couples(self) -> bool:
        """May some of it see several prompts or images of a batch? What says that it computes each token does not."""
        inside = [one.code for one in self.replaced if not one.merges]
        return bool(self.in_place) or not all(map(sees_each_token, inside))


def check_loop(replaced: Iterable[Replaced]) -> None:
    """Raises Unsendable for code of the sampling loop that packs have replaced, where workers cannot have theirs."""
    for one in replaced:
        if (reason := one.why_unsendable) is not None:
            raise Unsendable(reason.key, **reason.values)


def check_code(modules: tuple[str, ...]) -> None:
    """Raises Unsendable for code of these modules that another pack has replaced."""
    for one in replaced_code.replaced_in(modules):
        raise Unsendable("unsendable.code", name=one.name, code=one.by)


def replaced_on(model: ModelPatcher) -> list[Replaced]:
    """Returns what packs have replaced of the code that this MODEL's network runs, or that merges its patches."""
    network = model.model.diffusion_model
    native = vars(network).get("network", network)  # of one without weights
    return replaced_code.replaced_code([native], merging=bool(model.patches), loop=False)


def why_native(model: ModelPatcher, request: ParallelRequest) -> Sentence | None:
    """Says why only ComfyUI's own process can sample this MODEL with what packs have replaced of its code, as workers
    cannot have that, or would have to split the network; None where workers can."""
    replaced = replaced_on(model)
    for one in replaced:
        if (reason := one.why_unsendable) is not None:
            return reason
    if max(request.ring_degree, request.ulysses_degree, request.pipeline_degree) > 1:
        for one in replaced:
            if not one.merges:
                return say("unsendable.split", name=one.name, code=one.by)
    return None


def check_none(changes: Changes) -> None:
    """Raises Refused for the first of these changes."""
    for what, code in changes:
        raise Refused("network.changed", what=what, code=name_in_pack(code))


def check_model(model: ModelPatcher, network: nn.Module, *, of_pack: bool) -> None:
    """Raises Refused for a MODEL of another pack's class, unless workers have it too (`of_pack`), and for methods that
    another pack has put onto it or onto ComfyUI's model around the network, or hooks onto a part of the network."""
    if is_in_a_pack(type(model)) and not of_pack:
        check_none([("the MODEL's class", type(model))])
    for owner in (model, model.model):
        check_none((f"{type(owner).__name__}.{name}", code) for name, code in _methods_on(owner, type(owner)))
    for name, module in network.named_modules():
        check_none(_hooks_on(module, name or type(network).__name__))


def check_network(network: nn.Module, remote: nn.Module) -> None:
    """Raises Refused for what `changes_of` yields of this network, and for a method or hook on `remote` itself, which
    is called in its place."""
    check_none(changes_of(network))
    name = type(remote).__name__
    check_none([(f"{name}.{method}", code) for method, code in _methods_on(remote, type(remote))])
    check_none(_hooks_on(remote, name))


def layers_of_packs(network: nn.Module) -> list[str]:
    """Returns the first class of other packs' layers, if any, that may not compute each token by itself; those of
    ComfyUI-GGUF do."""
    for kind in dict.fromkeys(type(module) for module in network.modules()):
        if is_in_a_pack(kind) and GGUF_LAYER not in [base.__name__ for base in kind.__mro__]:
            return [name_in_pack(kind)]
    return []


def foreign_layers(network: nn.Module) -> Changes:
    """Yields the layers of other packs' classes, each with its class."""
    patched = _patched_now(network)
    for name, module in network.named_modules():
        if is_in_a_pack(type(module)) and not patched & {name, f"{name}.__class__"}:
            yield name or "the network", type(module)


def changes_of(network: nn.Module) -> Changes:
    """Yields methods and hooks that the network's own class does not have, and what packs have replaced of the code of
    all networks, each with that code. Takes 2 us for each module."""
    patched = _patched_now(network)
    for path, module in network.named_modules():
        if path in patched:
            continue
        name = path or type(network).__name__
        for method, code in _methods_on(module, type(module)):
            if f"{name}.{method}" not in patched:
                yield f"{name}.{method}", code
        yield from _hooks_on(module, name)
    yield from ((one.name, one.code) for one in replaced_code.replaced_in_network(network))


def _patched_now(network: nn.Module) -> set[str]:
    """Returns what the MODEL that ComfyUI has loaded now replaces in this network: the next one puts it back."""
    loaded = (one.model for one in comfy.model_management.current_loaded_models)
    patchers = [one for one in loaded if one is not None and getattr(one.model, NETWORK, None) is network]
    names = {name.removeprefix(f"{NETWORK}.") for one in patchers for name in one.object_patches_backup}
    return {name if "." in name else f"{type(network).__name__}.{name}" for name in names} | names


def _hooks_on(module: nn.Module, name: str) -> Changes:
    hooks = (hook for hooks in HOOKS for hook in vars(module)[hooks].values())
    yield from ((f"a hook on {name}", hook) for hook in hooks if _is_foreign(hook))


def code_on(owner: object, kind: type | None = None) -> dict[str, Any]:
    """Returns by name the methods of an object that its class, or this one, does not have, and other functions and
    objects of packs that are its attributes."""
    values: dict[str, Any] = vars(owner)
    packs = {name: one for name, one in values.items() if _may_be_code(one.__class__) and is_in_a_pack(one)}
    return packs | dict(_methods_on(owner, kind or type(owner)))


@functools.cache
def _may_be_code(kind: type) -> bool:
    return issubclass(kind, FunctionType | MethodType | functools.partial) or is_in_a_pack(kind)


def _methods_on(owner: object, kind: Any) -> Changes:
    """Yields methods of an object that this class of it does not have."""
    for method in vars(owner).keys() & _methods(kind):
        value = vars(owner)[method]
        put_back = value == MethodType(getattr(kind, method), owner)  # the class's own, by ComfyUI as it unpatched
        of_another = isinstance(getattr(value, "__self__", None), nn.Module)
        if (_is_foreign(value) or is_in_a_pack(kind) or of_another) and not put_back:
            yield method, value


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    """Returns the names of a class's methods, without the one that only says how many rows ComfyUI batches."""
    names = (name for name in dir(kind) if inspect.isfunction(inspect.getattr_static(kind, name)))
    return frozenset(names) - {"memory_required"}


def _is_foreign(value: Any) -> bool:
    return not is_comfyui(value) or is_in_a_pack(value)


def couples_evaluations(replaced: Replaced) -> bool:
    """May a pack's code around or inside an evaluation of the network keep something for the next one?"""
    module, _, name = replaced.name.rpartition(".")
    around = replaced.name.startswith(EVALUATE) or (module == "comfy.samplers" and name in EVALUATING)
    return around and _keeps(replaced.code, set())


def changes_itself(method: FunctionType) -> bool:
    """May this method of a pack, which may be ComfyUI's own in a class of it, assign to attributes?"""
    return is_of_a_pack(method) and any(step.opname == "STORE_ATTR" for step in _instructions(method.__code__))


def _keeps(function: Any, seen: set[int]) -> bool:
    """May this function assign to others' variables or attributes, or use what changes? A class may."""
    if not isinstance(function, FunctionType):
        return True
    if not is_of_a_pack(function):  # or one of a pack in a decorator
        return is_in_a_pack(function)
    if id(function) in seen:
        return False
    seen.add(id(function))
    for before, step in itertools.pairwise(_instructions(function.__code__)):
        outer = step.opname == "STORE_DEREF" and step.argval in function.__code__.co_freevars
        if outer or step.opname == "STORE_GLOBAL":
            return True
        owner = (
            replaced_code.variable(function, before.argval) if before.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else None
        )
        used = getattr(owner, step.argval, None) if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        changed = isinstance(owner, CHANGEABLE) or isinstance(used, (*CHANGEABLE, MethodType))
        if (owner is not None and step.opname == "STORE_ATTR") or changed:
            return True
        if any(_keeps(one, seen) for one in (owner, used) if is_of_a_pack(one) and isinstance(one, FunctionType)):
            return True
    return False


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _instructions(part)
