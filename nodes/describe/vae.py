"""Describes a VAE for the workers, or says why it stays in ComfyUI's process, and explains a decode for CP Plan.

CP VAE's network is divided, as some classes allow. One that a ControlNet or model patch encodes its pictures with is
whole on every worker: any class of ComfyUI's."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import comfy.sd

from ...parallel_runtime.architectures.autoencoders import COMPARED, WHOLE, kind_of, name_of
from ...parallel_runtime.errors import Refused, say
from ...parallel_runtime.explain.plan_report import share_cores
from ...parallel_runtime.explain.plan_words import Decode, decode_line
from ...parallel_runtime.loading.code_names import reference
from ...parallel_runtime.loading.fingerprint import model_fingerprint
from ...parallel_runtime.loading.replaced_code import name_in_pack
from ...parallel_runtime.planning.run_plan import DeviceProfile
from ...parallel_runtime.specs import ModelSpec, Placement
from .foreign_code import changes_of, foreign_layers

ARGUMENT_BYTES = 64 << 10  # a message may be twice as long


class NotParallel(Exception):
    """Says why ComfyUI's own process, not the workers, runs a VAE or a call of it."""


def describe_vae(vae: comfy.sd.VAE) -> ModelSpec:
    """Returns what the workers load to divide this VAE. Raises NotParallel."""
    check_vae(vae)
    return _spec_of(vae)


def describe_whole_vae(vae: comfy.sd.VAE) -> ModelSpec:
    """Returns what each worker loads to run this VAE undivided. Raises NotParallel."""
    _check_as_loaded(vae)
    spec = _spec_of(vae)
    if not spec.loader:  # ComfyUI tells these classes by their weights
        _check_compared(vae)
    return spec


def _spec_of(vae: comfy.sd.VAE) -> ModelSpec:
    model = vae.first_stage_model
    loader, arguments = _origin(vae)
    return ModelSpec(
        loader=loader,
        arguments=arguments,
        weight_dtype=str(vae.vae_dtype).removeprefix("torch."),
        kind=kind_of(model),
        weights_fingerprint=model_fingerprint(model, vae.vae_dtype),
    )


def check_vae(vae: comfy.sd.VAE) -> None:
    """Raises NotParallel for a VAE that the workers cannot divide."""
    if type(vae) is comfy.sd.VAE:
        _check_compared(vae)
        if vae.latent_dim == 1 or vae.extra_1d_channel is not None:
            raise NotParallel(say("vae.sound"))
    _check_as_loaded(vae)


def _check_compared(vae: comfy.sd.VAE) -> None:
    kind = kind_of(vae.first_stage_model)
    if kind not in COMPARED:
        why = WHOLE.get(name_of(vae.first_stage_model))
        raise NotParallel(say(why) if why else say("vae.unknown", kind=kind))


def _check_as_loaded(vae: comfy.sd.VAE) -> None:
    """Raises NotParallel for a VAE that is not as ComfyUI's own loaders made it."""
    if type(vae) is not comfy.sd.VAE:
        raise NotParallel(say("vae.foreign", kind=f"{type(vae).__module__}.{type(vae).__name__}"))
    if vae.patcher.patches or vae.patcher.object_patches:
        raise NotParallel(say("vae.patched"))
    for name, code in (*foreign_layers(vae.first_stage_model), *changes_of(vae.first_stage_model)):
        raise NotParallel(say("vae.code", what=name, code=name_in_pack(code)))


def encode_bytes(vae: comfy.sd.VAE, latent: tuple[int, ...]) -> int:
    """Returns ComfyUI's estimate of the memory that encoding a picture for a latent [B, C, (T,) H, W] takes."""
    if vae.latent_dim == 1:  # sound
        return 0
    unit, frames = vae.spacial_compression_encode(), latent[2] if len(latent) == 5 else 1
    time = [vae.upscale_ratio[0](frames)] if vae.latent_dim == 3 else []
    sizes = (1, vae.output_channels, *time, latent[-2] * unit, latent[-1] * unit)
    return int(vae.memory_used_encode(sizes, vae.vae_dtype))


def explain_decode(
    vae: Any, latent: tuple[int, ...], placement: Placement, profile: DeviceProfile | None
) -> str | tuple[str, ...]:
    """Returns sentences on the decode of a latent [B, C, (T,) H, W]. `vae`: VAE Decode's, with or without CP VAE."""
    native = getattr(vae, "native", vae)
    native.throw_exception_if_invalid()
    try:
        check_vae(native)
    except NotParallel as reason:
        return say("decode.whole", reason=reason.args[0])
    if native.latent_dim == 2 and len(latent) == 5:  # as ComfyUI does: a video's first frame
        latent = (*latent[:2], *latent[3:])
    if len(latent) != native.latent_dim + 2:
        return say("decode.dims", wanted=native.latent_dim + 2, found=len(latent))
    kind, dtype = kind_of(native.first_stage_model), native.vae_dtype
    tiles = COMPARED[kind].tiles
    grid = tiles.grid(native.first_stage_model, "decode", latent) if tiles else None
    decode = Decode(
        kind=kind,
        latent=latent,
        weight_bytes=native.model_size(),
        activation_bytes=int(native.memory_used_decode(latent, dtype)),
        item_bytes=dtype.itemsize,
        grid=grid,
        tile_bytes=int(native.memory_used_decode((*latent[:2], *grid.tile), dtype)) if grid else 0,
    )
    return decode_line(decode, len(placement.devices), None if share_cores(placement) else profile)


def _origin(vae: comfy.sd.VAE) -> tuple[str, str]:
    """Returns the function that made the VAE, with arguments in JSON; or "" and metadata that its weights lack."""
    init = vae.patcher.cached_patcher_init
    if init is not None and len(init) == 2 and init[0].__module__ == comfy.sd.VAE.__module__:
        with suppress(Refused, TypeError):  # a function without a name, or arguments that are not plain
            loader, arguments = reference(init[0], "the loader"), json.dumps(init[1])
            if len(arguments) < ARGUMENT_BYTES:
                return loader, arguments
    config = getattr(vae.first_stage_model, "config", None)
    metadata: dict[str, Any] = {"tae_latent_channels": vae.latent_channels}
    if isinstance(config, dict):
        metadata["config"] = json.dumps({"vae": config})
    return "", json.dumps(metadata)
