"""Describes what ComfyUI has loaded from files besides a MODEL's network, for loading/object_codec.py: by the file."""

from __future__ import annotations

from functools import partial
from typing import Any

from comfy.controlnet import ControlBase
from comfy.gligen import Gligen
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, qualified_name
from ...parallel_runtime.loading.object_codec import Describer, Parts
from .control_nets import KINDS, called_functions, describe_control_net, is_patched
from .model_files import gligen_file, hypernetwork_file, patch_file


def describer(
    latent: tuple[int, ...] | None = None, model: ModelPatcher | None = None, *, packs: bool = True
) -> Describer:
    """Returns a Describer for a run of MODEL on a `latent` [B, C, (T,) H, W]; None leaves out hints that a VAE encodes.
    Without `packs`, it takes no code of packs."""
    return Describer(model, partial(_describe_loaded, latent), packs=packs)


def _describe_loaded(latent: tuple[int, ...] | None, value: Any, to: Parts) -> dict[str, Any]:
    """Raises Unsendable where no file has the value's weights."""
    if isinstance(value, ControlBase):
        return _describe_control(latent, value, to)
    try:
        if isinstance(value, ModelPatcher):
            return {"file": patch_file(value), "network_alone": False}
        file = gligen_file(value) if isinstance(value, Gligen) else hypernetwork_file(value)
        return {"file": file, "network_alone": True}
    except LookupError as why:
        kinds = qualified_name(type(value))
        if isinstance(value, ModelPatcher):
            kinds += f" with a {qualified_name(type(value.model))}"
        raise Unsendable("unsendable.object.because", what=to.what, thing=kinds, reason=why) from None


def _describe_control(latent: tuple[int, ...] | None, control: ControlBase, to: Parts) -> dict[str, Any]:
    if type(control) not in KINDS:
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(type(control)))
    if is_patched(control) or not all(map(is_comfyui, called_functions(control))):
        raise Unsendable("unsendable.control.patched", what=to.what)
    try:
        described = describe_control_net(control, latent, to)
    except LookupError:
        raise Unsendable("unsendable.control.file", what=to.what) from None
    if described is None:
        raise Unsendable("unsendable.control.part", what=to.what)
    return described
