"""What the workers cannot honour, found before any of them is asked, and named. Nothing is ignored silently."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.families.base import Family
from .code import or_else, reference, title
from .patches import FUNCTIONS, OPTIONS, TRANSFORMER_OPTIONS, WAY_OUT, WRAPPERS, names_in

HONOURED_OBJECTS = {"model_sampling"}
# What ComfyUI leaves in transformer_options by itself.
BOOKKEEPING = {"sample_sigmas", "cond_or_uncond", "sigmas", "uuids"}
OPTION_TITLES = {"model_function_wrapper": "a model function wrapper", "context_handler": "context windows"}
DIMS = ("batch", "channels", "height", "width")
CONDITION_TITLES = {"control": "ControlNet", "hooks": "hooks (scheduled LoRA or masks)", "gligen": "GLIGEN boxes"}
READ_TITLES = {"ref_latents": "reference images (ref_latents)"}
SAMPLE_HERE = "sample with SamplerCustomAdvanced, which uses the workers too on a MODEL from CP Load Diffusion Model"
GUIDER_STATE = {"model_patcher", "model_options", "original_conds", "conds", "inner_model", "loaded_models"}


def check_model(model: ModelPatcher) -> None:
    """Raises Refused, naming everything on MODEL that workers would have to ignore."""
    if found := sorted(set(_on_model(model)) | set(_in_options(model.model_options))):
        raise Refused(f"CP Sampler cannot honour what is on this MODEL: {'; '.join(found)}. Please {WAY_OUT}")


def check_weights(model: ModelPatcher) -> None:
    """The same of what is on MODEL's weights alone, where the loop runs in ComfyUI's process."""
    if found := sorted(_on_weights(model)):
        raise Refused(f"a MODEL whose weights are in the workers cannot honour {'; '.join(found)}; remove it, or take "
                      "the MODEL from Load Diffusion Model")  # fmt: skip


def check_guider(guider: comfy.samplers.CFGGuider) -> tuple[str, dict[str, Any]]:
    """ComfyUI's name for the guider's class, and its plain attributes. Raises Refused for any other that it carries."""
    with or_else(SAMPLE_HERE):
        kind = reference(type(guider), "the GUIDER")
    attributes = {name: value for name, value in vars(guider).items() if name not in GUIDER_STATE}
    for name, value in attributes.items():
        if not isinstance(value, bool | int | float | str | None):
            raise Refused(f"the GUIDER {title(guider)} carries {name} ({title(value)}), which workers cannot have; "
                          f"{SAMPLE_HERE}")  # fmt: skip
    return kind, attributes


def check_guider_options(guider: comfy.samplers.CFGGuider) -> None:
    """Raises Refused for what lies on the GUIDER and not on its MODEL."""
    own, models = guider.model_options, guider.model_patcher.model_options
    if found := sorted(key for key in own.keys() | models.keys() if own.get(key) != models.get(key)):
        raise Refused(
            f"the GUIDER {title(guider)} has model options of its own ({', '.join(found)}), which workers cannot have; "
            f"{SAMPLE_HERE}"
        )


def check_sampler(sampler: comfy.samplers.Sampler) -> None:
    """Raises Refused for a SAMPLER that calls on more of the network than its evaluation."""
    function = inspect.unwrap(getattr(sampler, "sampler_function", sampler.sample))
    if "diffusion_model" in names_in(getattr(function, "__code__", None)):
        raise Refused(f"the SAMPLER {title(function)} reaches into the transformer, which is in the workers; choose "
                      "another sampler, or sample this MODEL with SamplerCustomAdvanced")  # fmt: skip


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
    model: ModelPatcher,
    conds: Mapping[str, list[dict[str, Any]]],
    family: Family,
    noise: Tensor,
    latent: Tensor,
    mask: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """Raises Refused for conditioning that the family's bridge has no use for, by ComfyUI's own reading of it."""
    for name, of_one in conds.items():
        for cond in of_one:
            _check_cond(name, cond, family)
        encoded = comfy.samplers.encode_model_conds(
            model.model.extra_conds,
            [dict(cond) for cond in of_one],
            noise,
            noise.device,
            name,
            latent_image=latent,
            denoise_mask=mask,
            seed=seed,
        )
        for cond in encoded:
            _check_read(name, cond["model_conds"], family, tuple(noise.shape))


def _check_cond(name: str, cond: dict[str, Any], family: Family) -> None:
    for key, called in CONDITION_TITLES.items():
        if cond.get(key) is not None:
            raise Refused(f"{name}: {called} in the CONDITIONING cannot run in the workers; {WAY_OUT}")
    width = cond["cross_attn"].shape[-1] if "cross_attn" in cond else None
    if width is not None and family.text_width is not None and width != family.text_width:
        raise Refused(
            f"{name}: the CONDITIONING is {width} wide, a {family.name} model wants {family.text_width}; use the text "
            "encoder that belongs to it"
        )
    pooled, wanted = cond.get("pooled_output"), family.config().get("pooled_projection_dim", 0)
    if pooled is not None and pooled.shape[-1] < wanted:
        raise Refused(
            f"{name}: the pooled text of the CONDITIONING is {pooled.shape[-1]} wide, a {family.name} model wants "
            f"{wanted}; use the text encoder that belongs to it"
        )


def _check_read(name: str, read: dict[str, Any], family: Family, latent_shape: tuple[int, ...]) -> None:
    """`read` is what ComfyUI's model makes of a condition for a latent [B, C, (T,) H, W]."""
    if unused := sorted(read.keys() - family.conditions):
        called = ", ".join(READ_TITLES.get(key, key) for key in unused)
        raise Refused(
            f"{name}: CP Sampler cannot honour {called} in the CONDITIONING of a {family.name} model; {WAY_OUT}"
        )
    text = read.get("c_crossattn")
    if family.needs_text and text is not None and not text.cond.shape[1]:
        raise Refused(f"{name}: the CONDITIONING has no tokens, a {family.name} model needs at least one; encode a "
                      "text, an empty one will do")  # fmt: skip
    check_call(name, family, latent_shape, {key: condition.cond for key, condition in read.items()})


def check_call(who: str, family: Family, latent_shape: tuple[int, ...], cond: Mapping[str, Any]) -> None:
    """Raises Refused for what the family has no answer to: a latent [B, C, (T,) H, W] or a condition."""
    try:
        family.check(latent_shape, cond)
    except ValueError as error:
        raise Refused(f"{who}: {error}") from None


def _on_model(model: ModelPatcher) -> Iterator[str]:
    yield from _on_weights(model)
    for name in set(model.object_patches) - HONOURED_OBJECTS:
        yield f"a replaced {name}"
    for name, models in model.additional_models.items():
        if models:
            yield f"additional models ({name})"
    yield from _code("wrapper", {kind: keys for kind, keys in model.wrappers.items() if kind not in WRAPPERS})
    yield from _code("callback", model.callbacks)


def _on_weights(model: ModelPatcher) -> Iterator[str]:
    if model.weight_wrapper_patches:
        yield "weight wrappers"
    for name, injections in model.injections.items():
        if injections:
            yield f"the injection {name}"
    if model.hook_patches or model.forced_hooks or model.current_hooks:
        yield "hooks (scheduled weights)"


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
    return value is None or (isinstance(value, dict | list | tuple | set) and not value)
