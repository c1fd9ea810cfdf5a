"""What lies on a MODEL and changes its weights, its guidance or its blocks, in words for the workers."""

from __future__ import annotations

from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter import WeightAdapterBase
from comfy_api.torch_helpers.torch_compile import TORCH_COMPILE_KWARGS

from ..parallel_runtime.errors import Refused
from .code import PLAIN, Unsendable, describe, title
from .encoded import Side, encoded_ahead

WAY_OUT = "remove it, or sample this MODEL with KSampler"
WAY_HERE = "remove it, or sample a MODEL of Load Diffusion Model with KSampler"
# What the sampling code leaves in model_options by itself, from what is sent otherwise.
MADE_ANEW = {"registered_hooks", "to_load_options", "multigpu_clones", "multigpu_thread_pool", TORCH_COMPILE_KWARGS}
OUTSIDE = {"wrappers", "callbacks"}  # of transformer_options: around the network, not in it
OVERRIDE = "optimized_attention_override"
INSIDE = ("patches", "patches_replace", OVERRIDE)
KEY = "context_parallel"


def describe_options(options: dict[str, Any], side: Side | None) -> dict[str, Any]:
    """A guider's model_options, for a latent of this side. Raises Unsendable for what is not ComfyUI's own."""
    described = {key: value for key, value in options.items() if key not in MADE_ANEW}
    inside = encoded_ahead(options.get("transformer_options", {}), side)
    described["transformer_options"] = {key: value for key, value in inside.items() if key not in OUTSIDE}
    return describe({key: value for key, value in described.items() if not _empty(value)}, "a model option")


def describe_functions(functions: dict[str, dict[Any, list[Any]]], what: str) -> list[list[Any]]:
    """[kind, key, functions] of each group of wrappers or callbacks on MODEL, in their order. Raises Unsendable."""
    return [
        [kind, key, describe(list(group), f"the {kind} {what}")]
        for kind, by_key in functions.items()
        for key, group in by_key.items()
        if group and key != KEY
    ]


def describe_weights(model: ModelPatcher) -> dict[str, list[Any]]:
    """MODEL's weight patches: LoRA and its kin, merged models. Raises Refused for foreign ones."""
    described = {}
    for key, patches in model.patches.items():
        try:
            described[key] = [describe(patch, f"the LoRA or merge on {key}") for patch in patches]
        except Unsendable as unsendable:
            raise Refused(f"{unsendable}; {WAY_OUT}") from None
    return described


def describe_inside(options: dict[str, Any], side: Side | None) -> dict[str, Any]:
    """The transformer_options that a network's blocks read, for a latent of this side. Raises Refused for foreign code
    among them.

    Foreign objects are left out: only foreign code could read them, and that is around the network, or refused here.
    """
    described = {}
    for key, value in encoded_ahead(options, side).items():
        if key in OUTSIDE or _empty(value):
            continue
        try:
            described[key] = describe(value, f"the transformer option {key}")
        except Unsendable as unsendable:
            if key in INSIDE:
                raise Refused(
                    f"inside the network's blocks there is {_authors(key, value)}: {unsendable}; {WAY_OUT}"
                ) from None
    return {"kind": "dict", "items": [[key, value] for key, value in described.items()]}


def check_inside(model: ModelPatcher) -> None:
    """Raises Refused, naming everything on MODEL that would be inside the network, where only workers could run it."""
    if found := sorted(_on_network(model)):
        raise Refused(f"CP Sampler cannot honour what is on this MODEL: {'; '.join(found)}. Please {WAY_OUT}")
    options = model.model_options["transformer_options"]
    describe_inside({key: value for key, value in options.items() if key in INSIDE}, None)


def check_sizes(model: ModelPatcher) -> None:
    """Raises Refused for a LoRA that changes a weight's size: code here would read the old size off the weight."""
    for key, patches in model.patches.items():
        for _, value, *_ in patches:
            if isinstance(value, WeightAdapterBase) and value.calculate_shape(key) is not None:
                raise Refused(
                    f"a LoRA makes {key} another size, which cannot be honoured while the sampler runs in ComfyUI's "
                    f"process; {WAY_HERE}"
                )


def _on_network(model: ModelPatcher) -> list[str]:
    found = ["weight wrappers"] if model.weight_wrapper_patches else []
    found += [f"the injection {name}" for name, injections in model.injections.items() if injections]
    replaced = {name for name in model.object_patches if name.startswith("diffusion_model")}
    return found + [f"a replaced {name}" for name in replaced - attributes_of(model).keys()]


def attributes_of(model: ModelPatcher) -> dict[str, Any]:
    """Plain values that MODEL has in place of its network's own, by name."""
    found = {name: value for name, value in model.object_patches.items() if name.startswith("diffusion_model.")}
    return {name: value for name, value in found.items() if isinstance(value, PLAIN)}


def check_attributes(model: ModelPatcher) -> None:
    """Raises Refused for those: ComfyUI would set them on the network that is here."""
    if found := sorted(attributes_of(model)):
        raise Refused(
            f"a replaced {', '.join(found)} cannot be honoured while the sampler runs in ComfyUI's process; {WAY_HERE}"
        )


def _authors(key: str, value: Any) -> str:
    """Whose code a patch is, where it can be told."""
    if not isinstance(value, dict):
        return f"{key} ({title(value)})"
    functions = [function for on in value.values() for function in (on.values() if isinstance(on, dict) else on)]
    return f"{', '.join(sorted(value))} ({', '.join(sorted({title(function) for function in functions}))})"


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple | set) and not value)
