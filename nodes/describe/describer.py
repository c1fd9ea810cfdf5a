"""Describes what ComfyUI has loaded from files besides a MODEL's network, for loading/object_codec.py: by the file; a
VAE without one with its weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from comfy.controlnet import ControlBase
from comfy.gligen import Gligen
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE

from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, qualified_name
from ...parallel_runtime.loading.object_codec import Describer, Parts
from .control_nets import KINDS, called_functions, describe_control_net, is_patched
from .model_files import gligen_file, hypernetwork_file, patch_file
from .vae import NotParallel, describe_whole_vae

VAE_FIELDS = ("loader", "arguments", "weight_dtype", "kind", "weights_fingerprint")  # of a ModelSpec


def describer(model: ModelPatcher | None = None, *, packs: bool = True) -> Describer:
    """Returns a Describer for a run of MODEL. Without `packs`, it takes no code of packs."""
    return Describer(model, _describe_loaded, packs=packs)


def _describe_loaded(value: Any, to: Parts) -> dict[str, Any]:
    """Raises Unsendable for what workers cannot load."""
    if isinstance(value, ControlBase):
        return _describe_control(value, to)
    try:
        if isinstance(value, VAE):
            return _describe_vae(getattr(value, "native", value), to)  # of a CP VAE
        if isinstance(value, ModelPatcher):
            return {"file": patch_file(value), "network_alone": False}
        file = gligen_file(value) if isinstance(value, Gligen) else hypernetwork_file(value)
        return {"file": file, "network_alone": True}
    except NotParallel as why:
        thing, reason = qualified_name(type(value)), why.args[0]
        raise Unsendable("unsendable.object.because", what=to.what, thing=thing, reason=reason) from None
    except LookupError as why:
        kinds = qualified_name(type(value))
        if isinstance(value, ModelPatcher):
            kinds += f" with a {qualified_name(type(value.model))}"
        raise Unsendable("unsendable.object.because", what=to.what, thing=kinds, reason=why) from None


def _describe_vae(vae: VAE, to: Parts) -> dict[str, Any]:
    spec = describe_whole_vae(vae)
    to.describer.vaes.append(vae)
    file = {"kind": "vae", "path": spec.title, "spec": {name: asdict(spec)[name] for name in VAE_FIELDS}}
    return {"file": file, "weights": None if spec.loader else to(dict(vae.get_sd()))}


def _describe_control(control: ControlBase, to: Parts) -> dict[str, Any]:
    if type(control) not in KINDS:
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(type(control)))
    if is_patched(control) or not all(map(is_comfyui, called_functions(control))):
        raise Unsendable("unsendable.control.patched", what=to.what)
    try:
        return describe_control_net(control, to)
    except LookupError:
        raise Unsendable("unsendable.control.file", what=to.what) from None
