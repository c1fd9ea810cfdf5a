"""Describes what is on a MODEL for the workers: model options, wrappers, block patches, torch.compile."""

from __future__ import annotations

import json
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import get_all_wrappers
from comfy_api.torch_helpers.torch_compile import TORCH_COMPILE_KWARGS

from ...parallel_runtime.errors import Refused, quoted
from ...parallel_runtime.request import CompileChoice
from ...parallel_runtime.specs import Compilation
from .comfy_objects import PLAIN, Describer, Unsendable, qualified_name
from .pre_encoding import LatentSize, pre_encode

# ComfyUI's sampling code makes these model options anew in the worker.
SET_BY_RUN = {"registered_hooks", "to_load_options", "multigpu_clones", "multigpu_thread_pool", TORCH_COMPILE_KWARGS}
AROUND_NETWORK = {"wrappers", "callbacks"}  # transformer_options that are around the network, not in it
OVERRIDE = "optimized_attention_override"
IN_BLOCKS = ("patches", "patches_replace", OVERRIDE)
WRAPPER_KEY = "context_parallel"


def describe_options(options: dict[str, Any], size: LatentSize | None, describer: Describer) -> dict[str, Any]:
    """Describes a guider's model_options for a latent of this size. Raises Unsendable for foreign code among them."""
    described = {key: value for key, value in options.items() if key not in SET_BY_RUN}
    inside = pre_encode(options.get("transformer_options", {}), size)
    described["transformer_options"] = {key: value for key, value in inside.items() if key not in AROUND_NETWORK}
    return describer.describe({key: value for key, value in described.items() if not _empty(value)}, "a model option")


def describe_functions(functions: dict[str, dict[Any, list[Any]]], what: str, describer: Describer) -> list[list[Any]]:
    """Returns [kind, key, functions] of each group of wrappers or callbacks, in their order. Raises Unsendable.

    Groups before our own wrapper are left out: ComfyUI calls them first, in its own process.
    """
    return [
        [kind, key, describer.describe(list(group), f"the {kind} {what}")]
        for kind, by_key in functions.items()
        for key, group in list(by_key.items())[list(by_key).index(WRAPPER_KEY) + 1 if WRAPPER_KEY in by_key else 0 :]
        if group
    ]


def wrappers_of(model: ModelPatcher, options: dict[str, Any], kind: str) -> list[Any]:
    """Returns the wrappers of this kind on MODEL and in model options; ComfyUI copies MODEL's there as a run begins."""
    return [*get_all_wrappers(kind, options, is_model_options=True), *model.get_all_wrappers(kind)]


def describe_transformer_options(options: dict[str, Any], size: LatentSize | None) -> dict[str, Any]:
    """Describes the transformer_options that a network's blocks read, for a latent of this size.

    Raises Refused for foreign code in the blocks. Other foreign objects are left out: only foreign code reads them.
    """
    described, describer = {}, Describer()
    for key, value in pre_encode(options, size).items():
        if key in AROUND_NETWORK or _empty(value):
            continue
        try:
            described[key] = describer.describe(value, f"the transformer option {key}")
        except Unsendable as unsendable:
            if key in IN_BLOCKS:
                what = _with_function_names(key, value)
                raise Refused("model.blocks", what=what, reason=unsendable.sentence) from None
    return {"kind": "dict", "items": [[key, value] for key, value in described.items()]}


def compilation(model: ModelPatcher, chosen: CompileChoice) -> Compilation | None:
    """Returns how the workers compile: as ComfyUI's set_torch_compile_wrapper says on MODEL, else as chosen. Raises
    Refused for a backend or option that is code."""
    kwargs = model.model_options.get(TORCH_COMPILE_KWARGS)
    if kwargs is None:
        return Compilation() if chosen == "on" else None
    if not isinstance(kwargs["backend"], str):
        raise Refused("compile.backend", backend=quoted(kwargs["backend"]))
    plain = {name: value for name, value in (kwargs["options"] or {}).items() if not callable(value)}
    try:
        options = json.dumps(plain, sort_keys=True)
    except TypeError as error:
        raise Refused("compile.option", error=str(error)) from None
    return Compilation(
        backend=kwargs["backend"],
        mode=kwargs["mode"],
        fullgraph=bool(kwargs["fullgraph"]),
        dynamic=kwargs["dynamic"],
        options=options,
    )


def check_network_patches(model: ModelPatcher) -> None:
    """Raises Refused with all patches of MODEL inside the network that the workers cannot run."""
    if foreign := sorted(_network_changes(model)):
        raise Refused("model.inside", things="; ".join(foreign))
    options = model.model_options["transformer_options"]
    describe_transformer_options({key: value for key, value in options.items() if key in IN_BLOCKS}, None)


def _network_changes(model: ModelPatcher) -> list[str]:
    """Returns English names of what MODEL changes on its network, besides plain attributes and block patches."""
    names = ["weight wrappers"] if model.weight_wrapper_patches else []
    names += ["forced hooks"] if model.forced_hooks else []
    names += [f"the injection {name}" for name, injections in model.injections.items() if injections]
    replaced = {name for name in model.object_patches if name.startswith("diffusion_model")}
    return names + [f"a replaced {name}" for name in replaced - replaced_attributes(model).keys()]


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
