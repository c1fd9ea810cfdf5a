"""Describes what is on a MODEL for the workers: model options, wrappers, block patches, torch.compile; and the
attention that a user chose for it: by a node, by the file, or by ComfyUI's flags.

Finds what couples the prompts and images of a batch: workers that evaluate different ones would change the result. Code
on a MODEL couples them if it computes with all of them at once, or if it keeps state from one evaluation to the next,
since each worker would keep the state of its own only. State is a variable that a function writes to, or an object that
two functions share; the functions themselves are read, whichever node made them."""

from __future__ import annotations

import dis
import functools
import inspect
import json
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
import torch
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP, get_all_wrappers
from comfy.sd import VAE
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS
from torch import Tensor, nn

from ...parallel_runtime import accelerators, jobs, specs
from ...parallel_runtime.architectures import architecture_of, block_patches, network_modules
from ...parallel_runtime.errors import Refused, quoted
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, is_of_a_pack, qualified_name
from ...parallel_runtime.loading.object_codec import PLAIN, Describer
from ...parallel_runtime.request import CompileChoice, ParallelRequest
from .model_files import describer

# ComfyUI's sampling code makes these model options anew in the worker.
SET_BY_RUN = {"registered_hooks", "to_load_options", "multigpu_clones", "multigpu_thread_pool", TORCH_COMPILE_KWARGS}
AROUND_NETWORK = {"wrappers", "callbacks"}  # transformer_options that are around the network, not in it
OVERRIDE = "optimized_attention_override"
IN_BLOCKS = ("patches", "patches_replace", OVERRIDE)
WRAPPER_KEY = "context_parallel"
COMPILED = "torch._dynamo.eval_frame.OptimizedModule"
CALLED_CALLBACKS = {  # that ComfyUI calls on a MODEL without weights too, or only for what is refused or left out
    "on_clone", "on_detach_after", "on_pre_run", "on_cleanup", "on_prepare_state", "on_apply_hooks",
    "on_register_all_hook_patches", "on_inject_model", "on_eject_model", "on_deepclone_multigpu",
    "on_match_multigpu_clones",
}  # fmt: skip
FLAGS = (
    "use_sage_attention", "use_flash_attention", "use_ck_attention", "use_split_cross_attention",
    "use_quad_cross_attention",
)  # fmt: skip  # not the one for PyTorch's own: what a ring has is PyTorch's too
STATELESS = (*PLAIN.__args__, Enum, type, types.ModuleType, Tensor, torch.dtype, nn.Module, ModelPatcher)
FUNCTION = "model_function_wrapper"  # the model option that is called around each evaluation
# Wrappers around one evaluation, and the callback between two with different hooks.
AROUND = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL, CallbacksMP.ON_APPLY_HOOKS)


def describe_options(options: dict[str, Any], describer: Describer) -> Any:
    """Describes a guider's model_options. Raises Unsendable."""
    inside = options.get("transformer_options", {})
    inside = {key: value for key, value in inside.items() if key not in AROUND_NETWORK}
    sent = {key: value for key, value in {**options, "transformer_options": inside}.items() if key not in SET_BY_RUN}
    return describer.describe({key: value for key, value in sent.items() if not _empty(value)}, "a model option")


def describe_functions(functions: dict[str, dict[Any, list[Any]]], what: str, describer: Describer) -> list[list[Any]]:
    """Describes each group of wrappers or callbacks, in their order: [kind, key, functions]. Raises Unsendable.

    Groups before our own wrapper are left out: ComfyUI calls them first, in its own process."""
    return [
        [kind, key, describer.describe(list(group), f"the {kind} {what}")]
        for kind, by_key in functions.items()
        for key, group in list(by_key.items())[list(by_key).index(WRAPPER_KEY) + 1 if WRAPPER_KEY in by_key else 0 :]
        if group and key != COMPILE_KEY  # the workers compile by the model options
    ]


def native_model(model: ModelPatcher) -> ModelPatcher:
    """Returns MODEL; of one without weights (remote/remote_model.py) the one that ComfyUI loaded."""
    native: ModelPatcher = vars(model.model.diffusion_model).get("native", model)
    return native


def native_network(model: ModelPatcher) -> nn.Module:
    """Returns MODEL's network, also while ComfyUI has put a compiled one in its place; of a MODEL without weights the
    network that the workers have."""
    return _uncompiled(native_model(model).model.diffusion_model)


def wrappers_of(model: ModelPatcher, options: dict[str, Any], kind: str) -> list[Any]:
    """Returns the wrappers of this kind on MODEL and in model options; ComfyUI copies MODEL's there as a run begins."""
    return [*get_all_wrappers(kind, options, is_model_options=True), *model.get_all_wrappers(kind)]


def describe_transformer_options(
    options: dict[str, Any], *, packs: bool = False, model: ModelPatcher | None = None
) -> tuple[jobs.Described, list[VAE]]:
    """Describes the transformer_options that a network's blocks read, and returns the VAEs in them.

    Raises Refused for foreign code in the blocks: without `packs` for that of packs, whose objects may keep state from
    one evaluation to the next. Other foreign objects are left out: only foreign code reads them."""
    described, options_describer = {}, describer(model=model, packs=packs)
    for key, value in options.items():
        if key in AROUND_NETWORK or _empty(value):
            continue
        try:
            described[key] = options_describer.describe(value, f"the transformer option {key}")
        except Unsendable as unsendable:
            if key not in IN_BLOCKS:
                continue
            what = f"{key} ({qualified_name(value)})"
            if isinstance(value, dict):  # names of functions tell the pack that they belong to
                each = (function for on in value.values() for function in (on.values() if isinstance(on, dict) else on))
                what = f"{', '.join(sorted(value))} ({', '.join(sorted({qualified_name(one) for one in each}))})"
            raise Refused("model.blocks", what=what, reason=unsendable.sentence) from None
    return options_describer.described(described), options_describer.vaes


def compilation(model: ModelPatcher, chosen: CompileChoice) -> specs.Compilation | None:
    """Returns how the workers compile: as ComfyUI's set_torch_compile_wrapper says on MODEL, else as chosen, or with
    torch's defaults where layers on it are compiled, which do not say how. Raises Refused for a backend or option that
    is code."""
    kwargs = model.model_options.get(TORCH_COMPILE_KWARGS)
    if kwargs is None:
        return specs.Compilation() if chosen == "on" or without_compiled(model) != model.object_patches else None
    if not isinstance(kwargs["backend"], str):
        raise Refused("compile.backend", backend=quoted(kwargs["backend"]))
    plain = {name: value for name, value in (kwargs["options"] or {}).items() if not callable(value)}
    try:
        options = json.dumps(plain, sort_keys=True)
    except TypeError as error:
        raise Refused("compile.option", error=str(error)) from None
    backend, mode, fullgraph, dynamic = (kwargs[name] for name in ("backend", "mode", "fullgraph", "dynamic"))
    return specs.Compilation(backend=backend, mode=mode, fullgraph=bool(fullgraph), dynamic=dynamic, options=options)


def check_network_patches(model: ModelPatcher) -> None:
    """Raises Refused with all patches of MODEL inside the network that the workers cannot run."""
    names = ["weight wrappers"] if model.weight_wrapper_patches else []
    names += ["forced hooks"] if model.forced_hooks else []
    names += [f"the injection {name}" for name, injections in model.injections.items() if injections]
    for name, value in replaced_methods(model).items():
        try:
            describer(model=model).describe(value, f"the replaced {name}")
        except Unsendable as reason:
            names.append(f"a replaced {name}: {reason.sentence}")
    for kind in model.callbacks.keys() - CALLED_CALLBACKS:
        callbacks = [callback for group in model.callbacks[kind].values() for callback in group]
        names += [f"the {kind} callback {qualified_name(one)}" for one in callbacks if not is_comfyui(one)]
    if names:
        raise Refused("model.inside", things="; ".join(sorted(names)))
    options = model.model_options["transformer_options"]
    in_blocks = {key: options[key] for key in IN_BLOCKS if key in options}
    describe_transformer_options(in_blocks, packs=True, model=model)


def replaced_methods(model: ModelPatcher) -> dict[str, Any]:
    """Returns the functions and objects with which MODEL replaces parts of its network, by name."""
    plain = replaced_attributes(model)
    patches = without_compiled(model).items()
    return {name: value for name, value in patches if name.startswith("diffusion_model") and name not in plain}


def without_compiled(model: ModelPatcher) -> dict[str, Any]:
    """Returns the object patches of MODEL, but for layers of its network that torch has compiled: workers compile their
    own."""
    patches = model.object_patches
    compiled = {name: patch for name, patch in patches.items() if _uncompiled(patch) is not patch}
    layers = dict(native_network(model).named_modules(prefix="diffusion_model")) if compiled else {}
    own = {name for name, patch in compiled.items() if _uncompiled(patch) is _uncompiled(layers.get(name))}
    return {name: patch for name, patch in patches.items() if name not in own}


def _uncompiled(module: Any) -> Any:
    return module._orig_mod if qualified_name(type(module)) == COMPILED else module


def replaced_attributes(model: ModelPatcher) -> dict[str, Any]:
    """Returns the plain values with which MODEL replaces attributes of its network, by name."""
    patches = ((name, value) for name, value in model.object_patches.items() if name.startswith("diffusion_model."))
    return {name: value for name, value in patches if isinstance(value, PLAIN)}


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple | set) and not value)


def without_lse(model: ModelPatcher, request: ParallelRequest) -> str:
    """Names the attention chosen for this MODEL that gives no log-sum-exp, which a ring merges by; "" for none."""
    override = model.model_options["transformer_options"].get(OVERRIDE)
    if override is not None:
        return "" if _has_lse(block_patches.attention_called_by(override)) else qualified_name(override)
    if request.options.attention_backend != "auto":
        return ""
    for function in network_modules.preferred_attentions(native_network(model)).values():
        if not _has_lse(function.__name__):
            return qualified_name(function)
    flag = next((flag for flag in FLAGS if getattr(args, flag, False)), None)
    own = comfy.ldm.modules.attention.optimized_attention
    if flag is None or _has_lse(own.__name__):
        return ""
    return f"--{flag.replace('_', '-')}"


def _has_lse(function: str) -> bool:
    """Has a ring on ComfyUI's kind of device a kernel of what the attention function of this name calls?"""
    backend, kind = accelerators.ring_backend(function), comfy.model_management.get_torch_device().type
    return backend == "auto" or (backend != "" and kind in accelerators.KERNELS[backend].devices)


def is_batch_coupled(model: ModelPatcher, options: dict[str, Any]) -> bool:
    """Must every worker evaluate all prompts and images with these model options?"""
    # A wrapper (EasyCache) may decide for all by one of them, and SelfAttentionGuidance keeps one prompt's attention.
    if wrappers_of(model, options, WrappersMP.DIFFUSION_MODEL) or keeps_state(model, options):
        return True
    return network_couples_batch(native_network(model), options.get("transformer_options", {}))


def network_couples_batch(network: nn.Module, options: dict[str, Any]) -> bool:
    """Does `network`, or a patch inside it (NAG), compute with all prompts and images of its batch?"""
    known = architecture_of(network)
    return any(options.get("patches", {}).values()) or (known is not None and known.batch_coupled(network))


def network_couples_images(network: nn.Module) -> bool:
    """Does `network` compute the images of a prompt together?"""
    # One that reads which prompts its batch has goes by the places of images in it: SeedVR2 swaps halves, Trellis2 has
    # the voxels of all in one table.
    for _, method in inspect.getmembers(type(network), inspect.isfunction):
        if "cond_or_uncond" in method.__code__.co_consts:
            return True
    known = architecture_of(network)
    return known is not None and known.images_coupled(network)


def couples_by_masks(network: nn.Module, *masks: Tensor | None) -> bool:
    """Do noise masks that differ between images couple these? LTX takes the first's, and a maximum of all."""
    calls = [vars(kind)["forward"] for kind in type(network).__mro__ if "forward" in vars(kind)]
    if not any("denoise_mask" in inspect.signature(call).parameters for call in calls):
        return False
    return any(bool((mask != mask[:1]).any()) for mask in masks if mask is not None)


def keeps_state(model: ModelPatcher, options: dict[str, Any]) -> bool:
    """Does code inside evaluations keep state, with these model options?"""
    inside, outside = _reachable(model, options, (*AROUND, FUNCTION))
    if any(map(_is_foreign, inside)):  # which may keep it anywhere
        return True
    return any(one.written or any(map(one.shares, inside + outside)) for one in inside)


def check_state(model: ModelPatcher, options: dict[str, Any]) -> None:
    """Raises Refused for code in the network's blocks that shares state with code in ComfyUI's process."""
    inside, outside = _reachable(model, options, ())
    for one in inside:
        for other in outside:
            if one.shares(other) and not _is_foreign(one):  # foreign code does not go along with an evaluation
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
            names = _written_variables(value.__code__)
            self._follow((value.__defaults__ or (), tuple((value.__kwdefaults__ or {}).values())))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if name in names:
                    self.written.add(id(cell))
                if id(cell) not in self.cells:
                    self.cells.add(id(cell))
                    content = None
                    with suppress(ValueError):  # nothing was assigned to it yet
                        content = cell.cell_contents
                    self._follow(content)
        elif isinstance(value, types.MethodType):
            self._follow((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._follow((value.func, value.args, value.keywords))
        else:
            if not isinstance(value, tuple):
                self.objects.add(id(value))
            for part in _parts(value):
                self._follow(part)


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
