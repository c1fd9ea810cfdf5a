"""The files of ControlNets, model patches, GLIGEN models and hypernetworks: ComfyUI's loaders, which the workers call
again, note the file that they read. Nodes of packs that call these loaders have their files noted too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from dataclasses import asdict
from typing import Any

import comfy.controlnet
import comfy.sd
import folder_paths
from comfy.controlnet import ControlBase, ControlLora, T2IAdapter
from comfy.gligen import Gligen
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_runtime.loading.code_names import module_named
from ...parallel_runtime.loading.fingerprint import check_unchanged, stat_file
from ...parallel_runtime.loading.replaced_code import GLIGEN
from ...parallel_runtime.specs import SourceFile
from .foreign_code import check_code

SAFETENSORS = (".safetensors", ".sft")
FOLDER = "model_patches"
_files: MutableMapping[Any, SourceFile] = WeakIdKeyDictionary()  # by what clones of a loaded model share


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
    """Returns `load`, which notes the file that `path_of` its arguments names; None for weights of more than a file, as
    those of a difference to a MODEL are."""

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


def hypernetwork_file(patch: Any) -> dict[str, Any]:
    """Describes the patch of HypernetworkLoader: its SourceFile and strength. Raises LookupError where its file
    is unknown, Refused where the file has changed."""
    return {"kind": "hypernetwork", **asdict(source_file(patch)), "strength": patch.strength}


def source_file(loaded: Any) -> SourceFile:
    """Returns the file that this was loaded from. Raises LookupError where that is unknown, Refused where the file has
    changed since."""
    file = _files.get(shared_part(loaded))
    if file is None:
        raise LookupError("ComfyUI's loader has not read it from a file")
    check_unchanged(file)
    return file
