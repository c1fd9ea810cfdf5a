"""Finds what couples the prompts and images of a batch: workers that evaluate different ones would change the result.

Code on a MODEL couples them if it computes with all of them at once, or if it keeps state from one evaluation to the
next, since each worker would keep the state of its own only. State is a variable that a function writes to, or an
object that two functions share; the functions themselves are read, whichever node made them."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import Tensor, nn

from ...parallel_runtime.architectures import architecture_of
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.loading.code_names import is_comfyui, is_of_a_pack, qualified_name
from ...parallel_runtime.loading.object_codec import PLAIN
from ...parallel_runtime.loading.replaced_code import Replaced, is_in_a_pack, variable
from .model_patches import AROUND_NETWORK, native_network, wrappers_of

STATELESS = (*PLAIN.__args__, Enum, type, types.ModuleType, Tensor, torch.dtype, nn.Module, ModelPatcher)
CHANGEABLE = (list, dict, set)
EVALUATE = ("comfy.conds.", "comfy.hooks.", "comfy.model_base.", "comfy.model_sampling.")  # inside evaluations
EVALUATING = {"_calc_cond_batch", "can_concat_cond", "cond_cat", "cond_equal_size", "finalize_default_conds",
              "get_area_and_mult"}  # fmt: skip
FUNCTION = "model_function_wrapper"  # the model option that is called around each evaluation
# Wrappers around one evaluation, and the callback between two with different hooks.
AROUND = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL, CallbacksMP.ON_APPLY_HOOKS)


def is_batch_coupled(model: ModelPatcher, options: dict[str, Any]) -> bool:
    """Must every worker evaluate all prompts and images with these model options?"""
    # A wrapper (EasyCache) may decide for all by one of them, and SelfAttentionGuidance keeps one prompt's attention.
    around = bool(wrappers_of(model, options, WrappersMP.DIFFUSION_MODEL)) or keeps_state(model, options)
    return around or network_couples_batch(native_network(model), options.get("transformer_options", {}))


def network_couples_batch(network: nn.Module, options: dict[str, Any]) -> bool:
    """Does `network`, or a patch inside it (NAG), compute with all prompts and images of its batch?"""
    known = architecture_of(network)
    return any(options.get("patches", {}).values()) or (known is not None and known.batch_coupled(network))


def network_couples_images(network: nn.Module) -> bool:
    """Does `network` compute the images of a prompt together?"""
    # Its plan may say so; and one that reads which prompts its batch has goes by the places of images in it: SeedVR2
    # swaps halves, Trellis2 has the voxels of all in one table.
    known, methods = architecture_of(network), inspect.getmembers(type(network), inspect.isfunction)
    reads_prompts = any("cond_or_uncond" in method.__code__.co_consts for _, method in methods)
    return reads_prompts or (known is not None and known.images_coupled(network))


def couples_by_masks(network: nn.Module, *masks: Tensor | None) -> bool:
    """Do noise masks that differ between images couple these? LTX takes the first's, and a maximum of all."""
    calls = [vars(kind)["forward"] for kind in type(network).__mro__ if "forward" in vars(kind)]
    if not any("denoise_mask" in inspect.signature(call).parameters for call in calls):
        return False
    return any(bool((mask != mask[:1]).any()) for mask in masks if mask is not None)


def couples_evaluations(replaced: Replaced) -> bool:
    """May a pack's code around or inside an evaluation of the network keep something for the next one?"""
    around = replaced.name.startswith(EVALUATE) or replaced.name in {f"comfy.samplers.{name}" for name in EVALUATING}
    return around and _keeps(replaced.code, set())


def changes_itself(method: types.FunctionType) -> bool:
    """May this method of a pack, which may be ComfyUI's own in a class of it, assign to attributes?"""
    return is_of_a_pack(method) and any(step.opname == "STORE_ATTR" for step in _instructions(method.__code__))


def _keeps(function: Any, seen: set[int]) -> bool:
    """May this function assign to others' variables or attributes, or use what changes? A class may."""
    if not isinstance(function, types.FunctionType):
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
        owner = variable(function, before.argval) if before.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else None
        used = getattr(owner, step.argval, None) if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        changed = isinstance(owner, CHANGEABLE) or isinstance(used, (*CHANGEABLE, types.MethodType))
        if (owner is not None and step.opname == "STORE_ATTR") or changed:
            return True
        if any(_keeps(one, seen) for one in (owner, used) if is_of_a_pack(one) and isinstance(one, types.FunctionType)):
            return True
    return False


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _instructions(part)


def keeps_state(model: ModelPatcher, options: dict[str, Any]) -> bool:
    """Does code inside evaluations keep state, with these model options?"""
    inside, outside = _reachable(model, options, (*AROUND, FUNCTION))
    if any(map(_is_foreign, inside)):  # which may keep it anywhere
        return True
    return any(one.written or any(map(one.shares, inside + outside)) for one in inside)


def check_state(model: ModelPatcher, options: dict[str, Any]) -> None:
    """Raises Refused for code in the network's blocks that shares state with code in ComfyUI's process."""
    inside, outside = _reachable(model, options, ())
    for one in (one for one in inside if not _is_foreign(one)):  # other code does not go along with an evaluation
        for other in filter(one.shares, outside):
            raise Refused("model.state", one=qualified_name(one.of), other=qualified_name(other.of))


def _reachable(
    model: ModelPatcher, options: dict[str, Any], around: tuple[str, ...]
) -> tuple[list[Reachable], list[Reachable]]:
    """Returns what code inside evaluations, the wrappers `around` them included, can reach; and what other code can."""
    blocks = options.get("transformer_options", {})
    inside = [value for key, value in blocks.items() if key not in AROUND_NETWORK]
    outside = [value for key, value in options.items() if key not in ("transformer_options", *around)]
    inside += [value for key, value in options.items() if key in around]
    for functions in (blocks.get("wrappers", {}), model.wrappers, model.callbacks):
        for kind, by_key in functions.items():
            (inside if kind in around else outside).append(by_key)
    return [*_each_reachable(inside)], [*_each_reachable(outside)]


def _is_foreign(one: Reachable) -> bool:
    value = one.of
    while isinstance(value, functools.partial):
        value = value.func
    return not is_comfyui(value) or is_of_a_pack(value)


def _each_reachable(values: list[Any]) -> Iterator[Reachable]:
    """Yields one Reachable for each different function or value in nested lists and dicts."""
    parts: list[Any] = list(values)
    seen: set[int] = set()
    while parts:
        value = parts.pop()
        if isinstance(value, dict | list | tuple):
            parts += _parts(value)
        elif not isinstance(value, STATELESS) and id(value) not in seen:
            seen.add(id(value))
            yield Reachable(value)


@dataclass
class Reachable:
    """The ids of mutable `objects` and of variables (`cells`) that can be reached from one function or value, and of
    the variables that it writes to (`written`)."""

    of: Any
    objects: set[int] = field(default_factory=set)
    cells: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._follow(self.of)

    def shares(self, other: Reachable) -> bool:
        """Can one of the two change what the other sees?"""
        written = (self.written | other.written) & self.cells & other.cells
        return self.of is not other.of and bool(written or self.objects & other.objects)

    def _follow(self, value: Any) -> None:
        if isinstance(value, STATELESS) or id(value) in self.objects:
            return
        if isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif isinstance(value, types.MethodType):
            self._follow((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._follow((value.func, value.args, value.keywords))
        else:
            if not isinstance(value, tuple):
                self.objects.add(id(value))
            for part in _parts(value):
                self._follow(part)

    def _follow_function(self, function: types.FunctionType) -> None:
        names = _written_variables(function.__code__)
        self._follow((function.__defaults__ or (), tuple((function.__kwdefaults__ or {}).values())))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name in names:
                self.written.add(id(cell))
            if id(cell) not in self.cells:
                self.cells.add(id(cell))
                content = None
                with suppress(ValueError):  # nothing was assigned to it yet
                    content = cell.cell_contents
                self._follow(content)


def _parts(value: Any) -> list[Any]:
    """Returns the parts of a container or of ComfyUI's object; none for a foreign object, which may hold anything."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if not isinstance(value, dict):
        value = vars(value) if hasattr(value, "__dict__") and is_comfyui(value) else {}
    return list(value.values())


@functools.cache
def _written_variables(code: types.CodeType) -> frozenset[str]:
    """Returns the outer functions' variables that a function's code, or one of its inner functions, assigns to."""
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = (_written_variables(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(assigned.union(*inner) & set(code.co_freevars))
