"""Describes what ComfyUI has loaded from files besides a MODEL's network, for loading/object_codec.py: ControlNets,
Control-LoRAs, T2I adapters, model patches, GLIGEN models and hypernetworks by their file; a VAE without one with its
weights.

ComfyUI's loaders, which the workers call again, note the file that they read, also where nodes of packs call them.
ComfyUI's own loop in the workers calls ControlNets, and the VAE that encodes a hint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import asdict
from typing import Any

import comfy.controlnet
import comfy.sd
import folder_paths
import torch
from comfy.controlnet import ControlBase, ControlLora, ControlNet, ControlNetSD35, QwenFunControlNet, T2IAdapter
from comfy.gligen import Gligen
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, module_named, qualified_name
from ...parallel_runtime.loading.fingerprint import check_unchanged, stat_file
from ...parallel_runtime.loading.object_codec import Describer, Parts
from ...parallel_runtime.loading.replaced_code import GLIGEN
from ...parallel_runtime.specs import SourceFile
from .foreign_code import check_code
from .vae import NotParallel, describe_whole_vae

SAFETENSORS = (".safetensors", ".sft")
FOLDER = "model_patches"
_files: MutableMapping[Any, SourceFile] = WeakIdKeyDictionary()  # by what clones of a loaded model share
Conds = Mapping[str, list[dict[str, Any]]]  # a guider's conditions: for each name, such as positive, ComfyUI's dicts
METHODS = ("pre_run", "get_control", "control_merge", "copy", "cleanup")
OUTPUTS = ("controlnet_blocks", "controlnet_single_blocks", "control_blocks")  # each of these modules gives a residual
CONTROL_CLASSES = (ControlNet, ControlNetSD35, QwenFunControlNet, ControlLora, T2IAdapter)
SETTINGS = (  # attributes that nodes and loaders set; all others belong to a run or to the loaded file
    "strength", "timestep_percent_range", "extra_args", "extra_conds", "strength_type", "global_average_pooling",
    "compression_ratio", "upscale_algorithm", "concat_mask",
)  # fmt: skip
VAE_FIELDS = ("loader", "arguments", "weight_dtype", "kind", "weights_fingerprint")  # of a ModelSpec


def note_files() -> None:
    """Has ComfyUI's loaders note the file that they read for what they return."""
    patch_loader = module_named("comfy_extras.nodes_model_patch").ModelPatchLoader
    for owner, name, path_of in (
        (comfy.controlnet, "load_controlnet", lambda path, model=None, *_, **__: path if model is None else None),
        (comfy.sd, "load_gligen", lambda path: path),
        (module_named("comfy_extras.nodes_hypernetwork"), "load_hypernetwork_patch", lambda path, strength: path),
        (patch_loader, "load_model_patch", lambda _, name: folder_paths.get_full_path(FOLDER, name)),
    ):
        setattr(owner, name, _noting(getattr(owner, name), path_of))


def _noting(load: Callable[..., Any], path_of: Callable[..., str | None]) -> Callable[..., Any]:
    """Returns `load` noting its file, `path_of` its arguments; None for weights of more, as of a difference."""

    @functools.wraps(load)
    def noting(*args: Any, **kwargs: Any) -> Any:
        path = path_of(*args, **kwargs)
        file = None if path is None else stat_file(path)
        made = load(*args, **kwargs)
        if file is not None and made is not None:
            _files[shared_part(made[0] if isinstance(made, tuple) else made)] = file
        return made

    return noting


def shared_part(loaded: Any) -> Any:
    """Returns what all clones of a model have in common: its network, or the first of a Control-LoRA's weights."""
    match loaded:
        case ModelPatcher():
            return loaded.model
        case ControlLora():
            return next(iter(loaded.control_weights.values()))
        case T2IAdapter():
            return loaded.t2i_model
        case ControlBase():
            return loaded.control_model
    return loaded


def patch_file(model: ModelPatcher) -> dict[str, Any]:
    """Describes a model of ModelPatchLoader: its SourceFile, and whether its weights are the file's, `assigned`, or
    copies in the dtype of its class; or a model of GLIGENLoader. Raises LookupError saying why workers cannot have it,
    Refused where the file has changed."""
    if isinstance(model.model, BaseModel):
        raise LookupError("it is a MODEL, not a model patch")
    if model.patches or model.object_patches or model.hook_patches:
        raise LookupError("it is patched itself")
    if isinstance(model.model, Gligen):
        return gligen_file(model.model)
    file = source_file(model)
    return {"kind": "model_patch", **asdict(file), "assigned": model.is_dynamic()}


def gligen_file(network: Gligen) -> dict[str, Any]:
    """Describes the network of GLIGENLoader: its SourceFile, and the dtype that it has in ComfyUI. Raises LookupError
    where its file is unknown, Refused where the file has changed, Unsendable where a pack has replaced its code."""
    check_code(GLIGEN)
    file = source_file(network)
    dtype = next(network.parameters()).dtype
    return {"kind": "gligen", **asdict(file), "dtype": str(dtype).removeprefix("torch.")}


def source_file(loaded: Any) -> SourceFile:
    """Returns the file this was loaded from. Raises LookupError if that is unknown, Refused if it has changed."""
    file = _files.get(shared_part(loaded))
    if file is None:
        raise LookupError("ComfyUI's loader has not read it from a file")
    check_unchanged(file)
    return file


def gligens_of(conds: Conds) -> list[ModelPatcher]:
    """Returns the GLIGEN models of these conditions, each once; they make a box for each image of a batch."""
    models = (cond["gligen"][1] for prompt in conds.values() for cond in prompt if cond.get("gligen"))
    return list(dict.fromkeys(models))


def is_patched(control: ControlBase) -> bool:
    """Does the ControlNet carry code or a LoRA that is not in its file?"""
    patcher = getattr(control, "control_model_wrapped", None)
    patched = patcher is not None and (patcher.patches or patcher.object_patches or patcher.hook_patches)
    return bool(patched) or control.extra_hooks is not None


def describe_control_net(control: ControlBase, to: Callable[[Any], Any]) -> dict[str, Any]:
    """Describes a ControlNet, its values by `to`. Raises LookupError for an unknown file, Refused for a changed one."""
    file, dtypes = source_file(control), ("", "")
    if isinstance(control, ControlNet) and not isinstance(control, ControlLora):
        dtypes = _dtype_name(control.control_model.dtype), _dtype_name(control.manual_cast_dtype)
    return {
        "file": {"kind": "control_net", **asdict(file), "dtype": dtypes[0], "computed": dtypes[1]},
        "settings": to({name: getattr(control, name) for name in SETTINGS}),
        "image": to(control.cond_hint_original.movedim(1, -1)),  # as it lies in memory
        "masks": to(list(control.extra_concat_orig)),
        "vae": to(control.vae),
        "previous": to(control.previous_controlnet),
    }


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def network_of(control: ControlBase) -> torch.nn.Module | None:
    """Returns the ControlNet's network; None for a Control-LoRA, which makes one from its MODEL's as a run begins."""
    return None if isinstance(control, ControlLora) else shared_part(control)


def weights_of(control: ControlBase) -> Iterable[Tensor]:
    network = network_of(control)
    return control.control_weights.values() if network is None else network.parameters()


def weight_bytes(controls: Iterable[ControlBase]) -> int:
    """Returns the bytes of all their weights; weights that several share count once."""
    bytes_by_id = {id(weight): weight.nbytes for control in controls for weight in weights_of(control)}
    return sum(bytes_by_id.values())


def count_residuals(controls: Iterable[ControlBase], layers: int) -> int:
    """Counts the tensors of all tokens that ControlNets give to `layers`: residuals, and a chain's sums."""
    outputs = (getattr(network_of(control), name, ()) for control in controls for name in OUTPUTS)
    return sum(map(len, outputs)) + layers * sum(control.previous_controlnet is not None for control in controls)


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
        if isinstance(value, Gligen):
            return {"file": gligen_file(value), "network_alone": True}
        file = {"kind": "hypernetwork", **asdict(source_file(value)), "strength": value.strength}
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
    if type(control) not in CONTROL_CLASSES:
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(type(control)))
    # What a run calls on it and on its network: a pack may have replaced that.
    called = [getattr(control, name) for name in METHODS]
    called += [] if (network := network_of(control)) is None else [network.forward]
    if is_patched(control) or not all(map(is_comfyui, called)):
        raise Unsendable("unsendable.control.patched", what=to.what)
    try:
        return describe_control_net(control, to)
    except LookupError:
        raise Unsendable("unsendable.control.file", what=to.what) from None
