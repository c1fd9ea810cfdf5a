"""Describes one run of a guider and sampler for the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.samplers
import torch
from comfy.hooks import EnumHookType
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...parallel_runtime.errors import quoted
from ...parallel_runtime.jobs import SamplingJob
from ...parallel_runtime.loading.random_states import random_states
from .batch_coupling import couples_by_masks, is_batch_coupled
from .comfy_objects import LOCAL, PLAIN, Describer, Unsendable, qualified_name, reference
from .control_nets import Conds, gligens_of, needs_full_latent
from .foreign_code import check_loop
from .input_checks import check_guider, check_latent, partner_of
from .model import DescribedModel
from .model_patches import LatentSize, describe_functions, describe_options, latent_size, replaced_attributes

SENDABLE_OBJECT_PATCHES = {"model_sampling", "manual_cast_dtype"}  # object patches that workers can have


@dataclass(frozen=True, eq=False)
class OuterSample:
    """The arguments of a guider's `outer_sample`, in ComfyUI's order. Several latents, of video and audio, are packed
    into one, and `latent_shapes` are theirs."""

    noise: Tensor
    latent_image: Tensor
    sampler: comfy.samplers.Sampler
    sigmas: Tensor
    denoise_mask: Tensor | None = None
    callback: Callable[[int, Any, Any, int], None] | None = None
    disable_pbar: bool = False
    seed: int | None = None
    latent_shapes: list | None = None

    @property
    def first_shape(self) -> tuple[int, ...]:
        """The shape [B, C, (T,) H, W] of the first latent."""
        return tuple(self.latent_shapes[0] if self.latent_shapes else self.noise.shape)


def describe_job(guider: comfy.samplers.CFGGuider, described: DescribedModel, call: OuterSample) -> SamplingJob:
    """Describes one call of `guider.outer_sample`. Raises Refused for a latent that the MODEL cannot take, Unsendable
    where the loop has to stay in ComfyUI's process."""
    several = len(call.latent_shapes or ()) > 1
    if not several:
        check_latent(guider.model_patcher, call.noise)
    kind, attributes = check_guider(guider)
    model, partner, options = guider.model_patcher, partner_of(guider), guider.model_options
    check_loop()
    network, mask = described.network, call.denoise_mask
    size = latent_size(network, call.first_shape)
    return SamplingJob(
        guider=kind,
        guider_attributes=attributes,
        sampler=Describer().describe(call.sampler, "the SAMPLER"),
        noise=call.noise,
        latent=call.latent_image,
        mask=mask,
        sigmas=call.sigmas,
        seed=call.seed,
        random_states=random_states(model.load_device),
        **_describe_on_model(model, options, size),
        partner=None if partner is None else _describe_on_model(partner, partner.model_options, size) | {"mask": None},
        weight_patches=described.weight_patches,
        batch_coupled=described.batch_coupled or is_batch_coupled(model, options) or couples_by_masks(network, mask),
        images_coupled=described.images_coupled or bool(gligens_of(guider.conds)),
        latent_shapes=[list(shape) for shape in call.latent_shapes or ()] if several else None,
        conds=describe_conds(guider.conds, options, call.first_shape),
    )


def _describe_on_model(model: ModelPatcher, options: dict[str, Any], size: LatentSize) -> dict[str, Any]:
    """Describes what is on a MODEL, with these model options: fields of a SamplingJob. Raises Unsendable."""
    if "registered_hooks" in options and options["registered_hooks"].get_type(EnumHookType.TransformerOptions):
        raise Unsendable("unsendable.hook")
    for name in model.object_patches.keys() - SENDABLE_OBJECT_PATCHES - replaced_attributes(model).keys():
        raise Unsendable("unsendable.replaced", name=name)
    for name, models in model.additional_models.items():
        if models:
            raise Unsendable("unsendable.models", name=name)
    describer = Describer()
    return {
        "model_sampling": _describe_model_sampling(model.get_model_object("model_sampling")),
        "attributes": replaced_attributes(model),
        "model_options": describe_options(options, size, describer),
        "wrappers": describe_functions(options["transformer_options"].get("wrappers", {}), "wrapper", describer),
        "callbacks": describe_functions(model.callbacks, "callback", describer),
    }


def describe_conds(conds: Conds, options: dict[str, Any], latent: tuple[int, ...] | None) -> Any:
    """Describes converted conditions, without the `uuid` that ComfyUI makes anew, for a `latent` of this shape; None:
    hints that a VAE has to encode are left out. Raises Unsendable."""
    what = "the CONDITIONING"
    if needs_full_latent(conds, options):
        raise Unsendable("unsendable.control.part", what=what)
    sendable = {
        name: [{key: value for key, value in cond.items() if key != "uuid"} for cond in prompt]
        for name, prompt in conds.items()
    }
    return Describer(latent).describe(sendable, what)


def _describe_model_sampling(sampling: torch.nn.Module) -> dict[str, Any]:
    kind = type(sampling)  # ComfyUI makes most of these classes in a function, from bases that have a name
    bases = kind.__bases__ if LOCAL in kind.__qualname__ else (kind,)
    if kind not in bases and any(map(callable, vars(kind).values())):
        raise Unsendable("unsendable.sampling", kind=qualified_name(kind))
    attributes = {name: value for name, value in vars(sampling).items() if name not in vars(nn.Module())}
    for name, value in attributes.items():
        if not isinstance(value, Tensor) and not _is_plain(value):
            raise Unsendable("unsendable.value", name=name, value=quoted(value))
    return {
        "bases": [reference(base, "the model sampling") for base in bases],
        "attributes": attributes,
        "buffers": dict(sampling.named_buffers()),
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
