"""What is done to a CP VAE in ComfyUI's process, without workers."""

from __future__ import annotations

import copy
import json
from typing import Any

from .pack import node_module

import comfy.sd  # isort: skip  # the pack's module has made ComfyUI importable
import torch  # isort: skip

from ..zoo import vaes  # isort: skip

vae = node_module("classes.cp_vae")


def _cp_vae() -> tuple[comfy.sd.VAE, Any]:
    model = vaes.random_weights(vaes.ltx(1))
    weights = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    native = comfy.sd.VAE(sd=weights, metadata={"config": json.dumps({"vae": model.config})})
    return native, vae.parallel_vae(native, None)


def copies(rank: int, world: int, how: str) -> dict[str, Any]:
    """Of a copy: is it a CP VAE, does it share the VAE that it was made of, and is that the same VAE to the bit?"""
    native, ours = _cp_vae()
    made = getattr(copy, how)(ours)
    inside = made.first_stage_model
    pairs = zip(native.get_sd().values(), made.get_sd().values(), strict=True)
    return {
        "kind": [type(made).__name__, type(inside).__name__],
        "shared": made.native is native,
        "one": inside._vae is made.native,
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "shape": list(inside.decode_output_shape((1, native.latent_channels, 2, 4, 4))),
        "expected": list(ours.first_stage_model.decode_output_shape((1, native.latent_channels, 2, 4, 4))),
    }


def answers(rank: int, world: int, half_made: bool, names: list[str]) -> dict[str, bool]:
    """Which of these attributes the stand-in for a VAE's network says that it has."""
    remote = _cp_vae()[1].first_stage_model
    asked = object.__new__(type(remote)) if half_made else remote
    return {name: hasattr(asked, name) for name in names}
