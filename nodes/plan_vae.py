"""CP Plan's line for the decode that follows the sampling."""

from __future__ import annotations

from typing import Any

from ..parallel_runtime.host.cost import Link
from ..parallel_runtime.host.decoding import Decode, decode_line
from ..parallel_runtime.host.report import share_cores
from ..parallel_runtime.host.sentences import say
from ..parallel_runtime.specs import Placement
from .describe_vae import Undivided, check_vae, kind_of


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
