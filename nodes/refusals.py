"""Bad input, found before any worker is asked, and named; and what must stay in ComfyUI's process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.networks import Network
from ..parallel_runtime.plan import Along
from .code import PLAIN, Unsendable, reference, title

SIDES = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}  # of a latent, by its dimensions
WHOLE_RUNS = {"step_cache": 0, "patches": 1}  # what workers need a whole run for, and the value that goes without
GUIDER_STATE = {"model_patcher", "model_options", "original_conds", "conds", "inner_model", "loaded_models"}


def check_guider(guider: comfy.samplers.CFGGuider) -> tuple[str, dict[str, Any]]:
    """ComfyUI's name for the guider's class, and its plain attributes. Raises Unsendable for any other."""
    kind = reference(type(guider), "the GUIDER")
    attributes = {name: value for name, value in vars(guider).items() if name not in GUIDER_STATE}
    for name, value in attributes.items():
        if not isinstance(value, PLAIN):
            raise Unsendable(f"the GUIDER {title(guider)} carries {name} ({title(value)})")
    return kind, attributes


def check_sampler(sampler: comfy.samplers.Sampler) -> None:
    """Raises Refused for a SAMPLER that calls on more of a network in the workers than its evaluation."""
    if reaches_in(sampler):
        raise Refused(f"the SAMPLER {title(function_of(sampler))} reaches into the network, which is in the workers; "
                      "choose another sampler, or sample this MODEL with SamplerCustomAdvanced")  # fmt: skip


def reaches_in(sampler: comfy.samplers.Sampler) -> bool:
    """Does a SAMPLER call on more of a network than its evaluation?"""
    return "diffusion_model" in names_in(getattr(function_of(sampler), "__code__", None))


def function_of(sampler: comfy.samplers.Sampler) -> Any:
    return inspect.unwrap(getattr(sampler, "sampler_function", sampler.sample))


def check_latent(model: ModelPatcher, latent: Tensor) -> None:
    """Raises Refused for a latent that MODEL cannot take, with the shape found and the shape wanted."""
    form = model.get_model_object("latent_format")
    dims = ("batch", "channels", *SIDES[form.latent_dimensions])
    if latent.ndim != len(dims) or latent.shape[1] != form.latent_channels or not latent.numel():
        raise Refused(
            f"the LATENT has the shape {tuple(latent.shape)}; this MODEL wants [{', '.join(dims)}] with "
            f"{form.latent_channels} channels and nothing empty; use the Empty Latent node of its family"
        )


def check_conds(plan: Network | None, network: Any, conds: Mapping[str, list[dict[str, Any]]]) -> None:
    """Raises Refused for a prompt of another text encoder than the network's, or of nothing."""
    if plan is None:
        return
    text, pooled = plan.text_width(network), plan.pooled_width(network)
    for name, cond in ((name, cond) for name, of_one in conds.items() for cond in of_one):
        tokens, vector = cond.get("cross_attn"), cond.get("pooled_output")
        if tokens is not None and text is not None and tokens.shape[-1] != text:
            raise Refused(f"{name}: the CONDITIONING is {tokens.shape[-1]} wide, a {plan.name} model wants {text}; "
                          "use the text encoder that belongs to it")  # fmt: skip
        if vector is not None and pooled is not None and vector.shape[-1] < pooled:
            raise Refused(
                f"{name}: the pooled text of the CONDITIONING is {vector.shape[-1]} wide, a {plan.name} model wants "
                f"{pooled}; use the text encoder that belongs to it"
            )
        if tokens is not None and not tokens.shape[1] and "text" in plan.tokens(network, (1, 1, 1, 1), 0):
            raise Refused(f"{name}: the CONDITIONING has no tokens, a {plan.name} model needs at least one; encode a "
                          "text, an empty one will do")  # fmt: skip


def check_for_patches(model: ModelPatcher, options: Mapping[str, Any], patches: int, *, compiled: bool) -> None:
    """Raises Refused for what on a MODEL with these model options needs all tokens of an evaluation at one time."""
    inside, around = options.get("transformer_options", {}), model.get_all_wrappers(WrappersMP.DIFFUSION_MODEL)
    kinds = [kind for kind, functions in inside.get("patches", {}).items() if functions]
    found = {
        f"model patches ({', '.join(kinds)})": kinds,
        "replaced blocks": inside.get("patches_replace", {}).get("dit"),
        "a step cache, or what else is around the network": around,
        "context windows": options.get("context_handler"),
        "torch.compile": compiled,
    }
    if named := [name for name, there in found.items() if there]:
        raise Refused(
            f"patches {patches} cannot go with what is on this MODEL: {'; '.join(named)}. No worker has all tokens of "
            "an evaluation at one time; take that away, or set patches to 1"
        )


def check_masks(plan: Network | None, conds: Mapping[str, list[dict[str, Any]]], patches: int) -> None:
    """Raises Refused for a prompt with a mask that would be cut as its tokens are."""
    sites = plan.plan.sites if plan is not None else ()
    masks = [
        name for site in sites for name, word in site.args.items() if "mask" in str(name) and isinstance(word, Along)
    ]
    for name, cond in ((name, cond) for name, of_one in conds.items() for cond in of_one):
        if masks and cond.get("attention_mask") is not None:
            raise Refused(f"{name}: the CONDITIONING has a mask, of which a patch would see its own part alone, and "
                          f"patches is {patches}; set it to 1")  # fmt: skip


def names_in(code: CodeType | None) -> Iterator[str]:
    """What a function's code and the functions in it name: attributes, globals, keys."""
    if code is not None:
        yield from code.co_names
        yield from (constant for constant in code.co_consts if isinstance(constant, str))
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from names_in(inner)
