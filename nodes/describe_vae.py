"""ComfyUI's VAE in words that a worker understands, or why it stays in ComfyUI's process; and in CP Plan's words."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import comfy.sd

from ..parallel_runtime.autoencoders import COMPARED, kind_of
from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.cost import Link
from ..parallel_runtime.host.decoding import Decode, decode_line
from ..parallel_runtime.host.report import share_cores
from ..parallel_runtime.host.sentences import say
from ..parallel_runtime.specs import ModelSpec, Placement
from ..parallel_runtime.witness import witness
from .code import reference

ARGUMENT_BYTES = 64 << 10  # of a message, which has room for twice as much


class Undivided(Exception):
    """A VAE, or a call of it, that ComfyUI's own process does; says why."""


def describe_vae(vae: comfy.sd.VAE) -> ModelSpec:
    """Raises Undivided."""
    check_vae(vae)
    model = vae.first_stage_model
    loader, arguments = _origin(vae)
    return ModelSpec(
        loader=loader,
        arguments=arguments,
        weight_dtype=str(vae.vae_dtype).removeprefix("torch."),
        kind=kind_of(model),
        witness=witness(model, vae.vae_dtype),
    )


def check_vae(vae: comfy.sd.VAE) -> None:
    """Raises Undivided for what cannot be divided, whatever is asked of it."""
    if type(vae) is not comfy.sd.VAE:
        raise Undivided(say("vae.foreign", kind=f"{type(vae).__module__}.{type(vae).__name__}"))
    kind = kind_of(vae.first_stage_model)
    if kind not in COMPARED:
        raise Undivided(say("vae.unknown", kind=kind))
    if vae.latent_dim == 1 or vae.extra_1d_channel is not None:
        raise Undivided(say("vae.sound"))
    if vae.patcher.patches or vae.patcher.object_patches:
        raise Undivided(say("vae.patched"))


def explain_decode(vae: Any, latent: tuple[int, ...], placement: Placement, link: Link | None) -> str | tuple[str, ...]:
    """Sentences for a latent [B, C, (T,) H, W]; `vae` is what VAE Decode gets, with or without CP VAE before it."""
    whole = getattr(vae, "whole", vae)
    whole.throw_exception_if_invalid()
    try:
        check_vae(whole)
    except Undivided as reason:
        return say("decode.whole", reason=reason.args[0])
    if whole.latent_dim == 2 and len(latent) == 5:  # as ComfyUI does: a video's first frame
        latent = (*latent[:2], *latent[3:])
    if len(latent) != whole.latent_dim + 2:
        return say("decode.dims", wanted=whole.latent_dim + 2, found=len(latent))
    decode = Decode(
        kind=kind_of(whole.first_stage_model),
        latent=latent,
        weight_bytes=whole.model_size(),
        activation_bytes=int(whole.memory_used_decode(latent, whole.vae_dtype)),
        item_bytes=whole.vae_dtype.itemsize,
    )
    return decode_line(decode, len(placement.devices), None if share_cores(placement) else link)


def _origin(vae: comfy.sd.VAE) -> tuple[str, str]:
    """ComfyUI's function that made it, and the arguments, as JSON; or "" and what its weights do not say."""
    init = vae.patcher.cached_patcher_init
    if init is not None and len(init) == 2 and init[0].__module__ == comfy.sd.__name__:
        with suppress(Refused, TypeError):  # a function without a name, or arguments that are not plain
            loader, arguments = reference(init[0], "the loader"), json.dumps(init[1])
            if len(arguments) < ARGUMENT_BYTES:
                return loader, arguments
    config = getattr(vae.first_stage_model, "config", None)
    metadata: dict[str, Any] = {"tae_latent_channels": vae.latent_channels}
    if isinstance(config, dict):
        metadata["config"] = json.dumps({"vae": config})
    return "", json.dumps(metadata)
