"""What is done to a CP VAE in ComfyUI's process, without workers."""

from __future__ import annotations

import copy
import json
import sys
import types
from typing import Any

from .pack import node_module

import comfy.sd  # isort: skip  # the pack's module has made ComfyUI importable
import torch  # isort: skip

from ..zoo import vaes  # isort: skip

vae, describe = node_module("remote.remote_vae"), node_module("describe.model_files")


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


def changed(rank: int, world: int, how: str) -> list[Any]:
    """Of a VAE whose layers a pack changes before, and after, CP VAE has it: is it left to ComfyUI's process, and does
    it decode as the pack's; and why, as CP Plan says it."""
    (before, _), (_, ours) = _cp_vae(), _cp_vae()
    _change(before.first_stage_model, how)
    _change(ours.native.first_stage_model, how)
    latent = torch.randn(1, before.latent_channels, 2, 4, 4, generator=torch.Generator().manual_seed(4))
    pictures = []
    for one in (ours, ours.native):
        torch.manual_seed(4)  # this VAE draws noise
        pictures.append(one.decode(latent))
    reason = describe.explain_decode(before, tuple(latent.shape), None, None)
    return [vae.parallel_vae(before, None) is before, torch.equal(*pictures), str(reason)]


def _change(network: torch.nn.Module, how: str) -> None:
    name, layer = next((name, one) for name, one in network.named_modules() if isinstance(one, torch.nn.Conv3d))
    if how == "a method":
        layer._conv_forward = types.MethodType(_doubled, layer)
    elif how == "a hook":
        layer.register_forward_hook(lambda module, args, out: out * 2)
    else:
        network.set_submodule(name, _layer_of_a_pack(layer))


def _doubled(self: torch.nn.Conv3d, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return type(self)._conv_forward(self, x, weight, bias) * 2


def _layer_of_a_pack(layer: torch.nn.Module) -> torch.nn.Module:
    pack = types.ModuleType("layers_of_a_pack")
    pack.__file__ = "/somewhere/custom_nodes/a_pack/layers.py"
    sys.modules["layers_of_a_pack"] = pack
    layer.__class__ = type("Layer", (type(layer),), {"__module__": "layers_of_a_pack"})
    return layer
