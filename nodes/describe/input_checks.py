"""Checks inputs before any worker is asked, and finds what must stay in ComfyUI's process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from types import CodeType
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...parallel_runtime.architectures import Architecture
from ...parallel_runtime.architectures.split_plan import SplitLike
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.jobs import TWO_MODEL_GUIDERS
from .comfy_objects import PLAIN, Unsendable, qualified_name, reference
from .control_nets import Conds
from .model_patches import wrappers_of

LATENT_DIMS = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}  # by a latent's dimensions
FULL_RUN_OPTIONS = {"step_cache": 0, "patches": 1}  # options that need the loop in the workers, with their off value
GUIDER_STATE = {
    "model_patcher", "model_options", "original_conds", "conds", "inner_model", "loaded_models",
    "uncond_inner", "uncond_loaded", "_uncond_neg", "_uncond_conds",  # of the second MODEL
}  # fmt: skip


def check_guider(guider: comfy.samplers.CFGGuider) -> tuple[str, dict[str, Any]]:
    """Returns ComfyUI's name for the guider's class, and its attributes. Raises Unsendable unless these are plain."""
    kind = reference(type(guider), "the GUIDER")
    state = {*GUIDER_STATE, TWO_MODEL_GUIDERS.get(kind)}
    attributes = {name: value for name, value in vars(guider).items() if name not in state}
    for name, value in attributes.items():
        if not isinstance(value, PLAIN):
            raise Unsendable("unsendable.guider", guider=qualified_name(guider), name=name, thing=qualified_name(value))
    return kind, attributes


def partner_of(guider: comfy.samplers.CFGGuider) -> ModelPatcher | None:
    """Returns the MODEL that the guider evaluates the negative prompt with, None where it is the guider's only one.
    Raises Unsendable for two MODELs of one network, of which ComfyUI loads one at a time."""
    model = guider.model_patcher
    other = getattr(guider, TWO_MODEL_GUIDERS.get(reference(type(guider), "the GUIDER"), ""), model)
    if math.isclose(guider.cfg, 1.0) or other is model:
        return None
    if other.model is not model.model:
        return other
    if other.patches_uuid != model.patches_uuid or other.object_patches != model.object_patches:
        raise unsendable_partner(guider)
    return None


def unsendable_partner(guider: comfy.samplers.CFGGuider) -> Unsendable:
    """Says that the second MODEL of a guider keeps the loop in ComfyUI's process."""
    name = TWO_MODEL_GUIDERS[reference(type(guider), "the GUIDER")]
    thing = qualified_name(getattr(guider, name))
    return Unsendable("unsendable.guider", guider=qualified_name(guider), name=name, thing=thing)


def uses_network(sampler: comfy.samplers.Sampler) -> bool:
    """Does the code of a SAMPLER use more of the network than its evaluation?"""
    return "diffusion_model" in names_in(getattr(unwrap_sampler(sampler), "__code__", None))


def unwrap_sampler(sampler: comfy.samplers.Sampler) -> Any:
    return inspect.unwrap(getattr(sampler, "sampler_function", sampler.sample))


def check_latent(model: ModelPatcher, latent: Tensor) -> None:
    """Raises Refused, with the shape and the right one, for a latent that MODEL cannot take."""
    form = model.get_model_object("latent_format")
    dims = ("batch", "channels", *LATENT_DIMS[form.latent_dimensions])
    if latent.ndim != len(dims) or latent.shape[1] != form.latent_channels or not latent.numel():
        raise Refused(
            "latent.shape", shape=str(tuple(latent.shape)), dims=", ".join(dims), channels=form.latent_channels
        )


def text_tokens(conds: Conds) -> int:
    """Returns the text tokens of the longest of these prompts."""
    texts = [cond["cross_attn"] for prompt in conds.values() for cond in prompt if "cross_attn" in cond]
    return max((text.shape[1] for text in texts), default=0)


def check_conds(architecture: Architecture | None, network: Any, conds: Conds) -> None:
    """Raises Refused for a prompt that another text encoder than the network's has made, or that has no tokens."""
    if architecture is None:
        return
    text, pooled = architecture.text_width(network), architecture.pooled_width(network)
    for name, cond in ((name, cond) for name, prompt in conds.items() for cond in prompt):
        tokens, vector = cond.get("cross_attn"), cond.get("pooled_output")
        if tokens is not None and text is not None and tokens.shape[-1] != text:
            raise Refused("conds.width", prompt=name, width=tokens.shape[-1], network=architecture.name, wanted=text)
        if vector is not None and pooled is not None and vector.shape[-1] < pooled:
            raise Refused("conds.pooled", prompt=name, width=vector.shape[-1], network=architecture.name, wanted=pooled)
        if tokens is not None and not tokens.shape[1] and "text" in architecture.tokens(network, (1, 1, 1, 1), 0):
            raise Refused("conds.empty", prompt=name, network=architecture.name)


def check_token_patches(
    guider: comfy.samplers.CFGGuider, architecture: Architecture | None, patches: int, *, compiled: bool
) -> None:
    """Raises Refused where something on the guider's MODEL, or in its model options or prompts, needs all tokens of an
    evaluation at once; also for a prompt's mask that would be split like its tokens."""
    options, conds = guider.model_options, guider.conds
    inside = options.get("transformer_options", {})
    kinds = [kind for kind, functions in inside.get("patches", {}).items() if functions]
    present = {
        f"model patches ({', '.join(kinds)})": kinds,
        "replaced blocks": inside.get("patches_replace", {}).get("dit"),
        "a wrapper around the network, such as a step cache": wrappers_of(
            guider.model_patcher, options, WrappersMP.DIFFUSION_MODEL
        ),
        "context windows": options.get("context_handler"),
        "torch.compile": compiled,
    }
    if named := [name for name, value in present.items() if value]:
        raise Refused("patches.model", widget="patches", patches=patches, things="; ".join(named))
    args = [arg for module in architecture.plan.module_plans for arg in module.args.items()] if architecture else []
    split_masks = any("mask" in str(name) and isinstance(spec, SplitLike) for name, spec in args)
    for name, prompt in conds.items():
        if split_masks and any(cond.get("attention_mask") is not None for cond in prompt):
            raise Refused("conds.mask", widget="patches", prompt=name, patches=patches)


def names_in(code: CodeType | None) -> Iterator[str]:
    """Yields the names in a function's code and its inner functions: attributes, globals, strings."""
    if code is not None:
        yield from code.co_names
        yield from (constant for constant in code.co_consts if isinstance(constant, str))
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from names_in(inner)
