"""CP Plan's line for the decode that follows the sampling."""

from __future__ import annotations

from typing import Any

from ..parallel_runtime.host.decoding import Decode, decode_line
from ..parallel_runtime.host.runtime import measured_link
from ..parallel_runtime.specs import Placement
from .describe_vae import Undivided, check_vae, kind_of


def explain_decode(vae: Any, latent: tuple[int, ...], placement: Placement) -> str:
    """One line for a latent [B, C, (T,) H, W]; `vae` is what VAE Decode gets, with or without CP VAE before it."""
    whole = getattr(vae, "whole", vae)
    try:
        check_vae(whole)
    except Undivided as reason:
        return f"Decode: in ComfyUI's process; CP VAE would not divide it: {reason}."
    decode = Decode(
        kind=kind_of(whole.first_stage_model),
        latent=latent,
        weight_bytes=whole.model_size(),
        activation_bytes=int(whole.memory_used_decode(latent, whole.vae_dtype)),
        item_bytes=whole.vae_dtype.itemsize,
    )
    return decode_line(decode, len(placement.devices), measured_link(placement))
