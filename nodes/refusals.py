"""What the workers cannot honour, found before any of them is asked, and named. Nothing is ignored silently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.families.base import Family
from .code import title
from .patches import FUNCTIONS, OPTIONS, TRANSFORMER_OPTIONS, WAY_OUT, WRAPPERS

HONOURED_OBJECTS = {"model_sampling"}
# What ComfyUI leaves in transformer_options by itself.
BOOKKEEPING = {"sample_sigmas", "cond_or_uncond", "sigmas", "uuids"}
OPTION_TITLES = {"model_function_wrapper": "a model function wrapper", "context_handler": "context windows"}
DIMS = ("batch", "channels", "height", "width")
CONDITION_TITLES = {"control": "ControlNet", "hooks": "hooks (scheduled LoRA or masks)", "gligen": "GLIGEN boxes"}
GUIDER_STATE = {"model_patcher", "model_options", "original_conds", "conds", "inner_model", "loaded_models"}


def check_model(model: ModelPatcher) -> None:
    """Raises Refused, naming everything on MODEL that workers would have to ignore."""
    if found := sorted(set(_on_model(model)) | set(_in_options(model.model_options))):
        raise Refused(f"CP Sampler cannot honour what is on this MODEL: {'; '.join(found)}. Please {WAY_OUT}")


def check_guider(guider: comfy.samplers.CFGGuider) -> dict[str, Any]:
    """The guider's plain attributes. Raises Refused for any other that it carries."""
    attributes = {name: value for name, value in vars(guider).items() if name not in GUIDER_STATE}
    for name, value in attributes.items():
        if not isinstance(value, bool | int | float | str | None):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise Refused(f"the GUIDER {type(guider).__name__} carries {name} ({kind}), which workers cannot have")
    return attributes


def check_latent(model: ModelPatcher, latent: Tensor) -> None:
    """Raises Refused for a latent that MODEL cannot take, with the shape found and the shape wanted."""
    form = model.get_model_object("latent_format")
    dims = ("batch", "channels", "frames", "height", "width") if form.latent_dimensions == 3 else DIMS
    if latent.ndim != len(dims) or latent.shape[1] != form.latent_channels or not latent.numel():
        raise Refused(
            f"the LATENT has the shape {tuple(latent.shape)}; this MODEL wants [{', '.join(dims)}] with "
            f"{form.latent_channels} channels and nothing empty; use the Empty Latent node of its family"
        )


def check_conds(
    guider: comfy.samplers.CFGGuider,
    family: Family,
    noise: Tensor,
    latent: Tensor,
    mask: Tensor | None,
    seed: int | None,
) -> None:
    """Raises Refused for conditioning that the family's bridge has no use for, by ComfyUI's own reading of it."""
    for name, conds in guider.conds.items():
        for cond in conds:
            for key, called in CONDITION_TITLES.items():
                if cond.get(key) is not None:
                    raise Refused(f"{name}: {called} in the CONDITIONING cannot run in the workers; {WAY_OUT}")
            width = cond["cross_attn"].shape[-1] if "cross_attn" in cond else None
            if width is not None and family.text_width is not None and width != family.text_width:
                raise Refused(
                    f"{name}: the CONDITIONING is {width} wide, a {family.name} model wants {family.text_width}; use "
                    "the text encoder that belongs to it"
                )
        encoded = comfy.samplers.encode_model_conds(
            guider.model_patcher.model.extra_conds,
            [dict(cond) for cond in conds],
            noise,
            noise.device,
            name,
            latent_image=latent,
            denoise_mask=mask,
            seed=seed,
        )
        unused = {key for cond in encoded for key in cond["model_conds"]} - family.conditions
        if unused:
            raise Refused(
                f"{name}: CP Sampler cannot honour {', '.join(sorted(unused))} in the CONDITIONING of a {family.name} "
                f"model; {WAY_OUT}"
            )


def _on_model(model: ModelPatcher) -> Iterator[str]:
    for name in set(model.object_patches) - HONOURED_OBJECTS:
        yield f"a replaced {name}"
    if model.weight_wrapper_patches:
        yield "weight wrappers"
    for name, injections in model.injections.items():
        if injections:
            yield f"the injection {name}"
    if model.hook_patches or model.forced_hooks or model.current_hooks:
        yield "hooks (scheduled weights)"
    for name, models in model.additional_models.items():
        if models:
            yield f"additional models ({name})"
    yield from _code("wrapper", {kind: keys for kind, keys in model.wrappers.items() if kind not in WRAPPERS})
    yield from _code("callback", model.callbacks)


def _in_options(options: dict[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if key == "transformer_options":
            yield from _in_transformer_options(value)
        elif key not in OPTIONS | FUNCTIONS.keys() and not _empty(value):
            yield OPTION_TITLES.get(key, f"the model option {key}")


def _in_transformer_options(options: dict[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if key in BOOKKEEPING | TRANSFORMER_OPTIONS or _empty(value):
            continue
        if key in ("patches", "patches_replace"):
            yield from (f"the attention or block patch {name}{_authors(on)}" for name, on in value.items() if on)
        elif key in ("wrappers", "callbacks"):
            yield from _code(key[:-1], value)
        else:
            yield f"the transformer option {key}"


def _code(what: str, by_type: dict[str, dict[str | None, list]]) -> Iterator[str]:
    for kind, by_key in by_type.items():
        for key, functions in by_key.items():
            if functions:
                yield f"the {kind} {what} {key or title(functions[0])}"


def _authors(patches: Any) -> str:
    """Whose code a patch is, where it can be told."""
    functions = patches.values() if isinstance(patches, dict) else patches
    return f" ({', '.join(sorted({title(function) for function in functions}))})"


def _empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, dict | list | tuple | set) and not value)
