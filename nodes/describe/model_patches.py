"""Describes what is on a MODEL for the workers: model options, wrappers, block patches, torch.compile; and the
attention that a user chose for it: by a node, by the file, or by ComfyUI's flags."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import get_all_wrappers
from comfy.sd import VAE
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS
from torch import nn

from ...parallel_runtime.accelerators import KERNELS, ring_backend
from ...parallel_runtime.architectures.block_patches import attention_called_by
from ...parallel_runtime.architectures.network_modules import preferred_attentions
from ...parallel_runtime.errors import Refused, quoted
from ...parallel_runtime.jobs import Described
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, qualified_name
from ...parallel_runtime.loading.object_codec import PLAIN, Describer
from ...parallel_runtime.request import CompileChoice, ParallelRequest
from ...parallel_runtime.specs import Compilation
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
) -> tuple[Described, list[VAE]]:
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
            if key in IN_BLOCKS:
                what = _with_function_names(key, value)
                raise Refused("model.blocks", what=what, reason=unsendable.sentence) from None
    return options_describer.described(described), options_describer.vaes


def compilation(model: ModelPatcher, chosen: CompileChoice) -> Compilation | None:
    """Returns how the workers compile: as ComfyUI's set_torch_compile_wrapper says on MODEL, else as chosen, or with
    torch's defaults where layers on it are compiled, which do not say how. Raises Refused for a backend or option that
    is code."""
    kwargs = model.model_options.get(TORCH_COMPILE_KWARGS)
    if kwargs is None:
        return Compilation() if chosen == "on" or without_compiled(model) != model.object_patches else None
    if not isinstance(kwargs["backend"], str):
        raise Refused("compile.backend", backend=quoted(kwargs["backend"]))
    plain = {name: value for name, value in (kwargs["options"] or {}).items() if not callable(value)}
    try:
        options = json.dumps(plain, sort_keys=True)
    except TypeError as error:
        raise Refused("compile.option", error=str(error)) from None
    backend, mode, fullgraph, dynamic = (kwargs[name] for name in ("backend", "mode", "fullgraph", "dynamic"))
    return Compilation(backend=backend, mode=mode, fullgraph=bool(fullgraph), dynamic=dynamic, options=options)


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
        foreign = (one for one in chain.from_iterable(model.callbacks[kind].values()) if not is_comfyui(one))
        names += [f"the {kind} callback {qualified_name(callback)}" for callback in foreign]
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


def _with_function_names(key: str, value: Any) -> str:
    """Returns the option's name with those of its functions, which tell the pack that they belong to."""
    if not isinstance(value, dict):
        return f"{key} ({qualified_name(value)})"
    functions = [function for on in value.values() for function in (on.values() if isinstance(on, dict) else on)]
    return f"{', '.join(sorted(value))} ({', '.join(sorted({qualified_name(function) for function in functions}))})"


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple | set) and not value)


def without_lse(model: ModelPatcher, request: ParallelRequest) -> str:
    """Names the attention chosen for this MODEL that gives no log-sum-exp, which a ring merges by; "" for none."""
    override = model.model_options["transformer_options"].get(OVERRIDE)
    if override is not None:
        return "" if _has_lse(attention_called_by(override)) else qualified_name(override)
    if request.options.attention_backend != "auto":
        return ""
    for function in preferred_attentions(native_network(model)).values():
        if not _has_lse(function.__name__):
            return qualified_name(function)
    flag = next((flag for flag in FLAGS if getattr(args, flag, False)), None)
    own = comfy.ldm.modules.attention.optimized_attention
    if flag is None or _has_lse(own.__name__):
        return ""
    return f"--{flag.replace('_', '-')}"


def _has_lse(function: str) -> bool:
    """Has a ring on ComfyUI's kind of device a kernel of what the attention function of this name calls?"""
    backend, kind = ring_backend(function), comfy.model_management.get_torch_device().type
    return backend == "auto" or (backend != "" and kind in KERNELS[backend].devices)
