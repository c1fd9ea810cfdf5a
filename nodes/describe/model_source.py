"""What workers load for a MODEL or a CLIP, without patches: the call of ComfyUI's loader and its files, or, of one that
names no file, of the node that has made it. Describes also a call of a CLIP's text encoder, or says why ComfyUI's own
process runs it.

torch tells us of each network that is put into a model, ComfyUI of each other model that gets a ModelPatcher, such as
a CLIP's text encoder, and which node of which prompt runs at that moment. Workers call that node with the same inputs.
"""

import functools
import inspect
import json
import os
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import Any

import comfy.sd
import folder_paths
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph import NodeNotFoundError
from comfy_execution.graph_utils import is_link
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from nodes import NODE_CLASS_MAPPINGS  # type: ignore[attr-defined]  # ComfyUI's module, not our package
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_runtime.errors import Refused, say
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.jobs import Described
from ...parallel_runtime.loading import code_names, mapped, replaced_code
from ...parallel_runtime.loading.code_names import is_comfyui, qualified_name, reference
from ...parallel_runtime.loading.fingerprint import stat_file
from ...parallel_runtime.specs import ModelSpec, SourceFile
from .foreign_code import NETWORK, changes_of, check_code, foreign_layers
from .model_files import NotParallel, describer
from .model_patches import native_model, native_network
from .network_parts import changed_since_made, made_by_node, parts_of

DTYPE = "manual_cast_dtype"  # ComfyUI replaces it on each CLIP: encoders compute in it
DEVICES = {"load_device", "offload_device", "initial_device"}  # options of loaders; workers have their own
INSIDE = ("injections", "weight_wrapper_patches", "wrappers", "callbacks", "additional_models")  # of a patcher
# By the model in a ModelPatcher: the node of the prompt that has made it, and its inputs, values or links.
_calls: MutableMapping[Any, tuple[str, dict[str, Any]]] = WeakIdKeyDictionary()


def note_loaders() -> None:
    """Has torch tell us of networks, and ComfyUI of ModelPatchers, from now on."""
    register_module_module_registration_hook(_note)
    begin = ModelPatcher.__init__

    @functools.wraps(begin)
    def noting(patcher: ModelPatcher, model: Any, *args: Any, **kwargs: Any) -> None:
        begin(patcher, model, *args, **kwargs)
        if isinstance(model, nn.Module) and not isinstance(model, BaseModel) and model not in _calls:
            _note_running(model)

    ModelPatcher.__init__ = noting


def _note(owner: nn.Module, name: str, network: nn.Module | None) -> None:
    is_model = name == NETWORK and isinstance(owner, BaseModel) and "latent_format" in vars(owner)
    if is_model and network is not None and _note_running(owner):
        made_by_node[owner] = parts_of(owner.latent_format, network)


def _note_running(model: nn.Module) -> bool:
    """Notes the node that runs at this moment, if one does, as that which makes the model."""
    if (running := get_executing_context()) is not None:
        with suppress(NodeNotFoundError):  # a pack may run a prompt of its own
            node = get_progress_state().dynprompt.get_node(running.node_id)
            _calls[model] = node["class_type"], dict(node["inputs"])
            return True
    return False


def note_call(model: BaseModel, node: str, inputs: dict[str, Any]) -> None:
    """Has workers call this node for the MODEL that it has just made."""
    _calls[model], made_by_node[model] = (node, inputs), parts_of(model.latent_format, model.diffusion_model)


def model_spec(model: ModelPatcher) -> ModelSpec:
    """Returns the call that loads this MODEL's network, without patches. Raises Refused where that is unknown, or a
    file has changed since MODEL was first seen."""
    model = native_model(model)
    init = getattr(model, "cached_patcher_init", None)
    if init is None or not is_comfyui(init[0]):
        spec = _spec_by_node(model)
        _check_first_seen(model, spec.files)
        return spec
    loader, _, *index = init
    named = [value for value in init[1] if isinstance(value, str)]
    paths = [name for name in named if os.path.isabs(name) and os.path.splitext(name)[1]]
    for path in paths:
        if not os.path.exists(path):
            raise Refused("model.gone", path=path)
    files = tuple(stat_file(path) for path in paths if os.path.isfile(path))
    _check_first_seen(model, files)
    try:
        name = reference(loader, "the loader")
    except Refused as refused:
        raise Refused("loader.foreign", reason=refused.sentence) from None
    to_json = functools.partial(_argument_to_json, loader)
    return ModelSpec(
        loader=name,
        arguments=json.dumps(_arguments_with_dtype(model), sort_keys=True, default=to_json),
        index=index[0] if index else None,
        files=files,
        weight_dtype=str(model.model.get_dtype()).removeprefix("torch."),
        dynamic_vram=mapped.has_dynamic_vram(),
    )


def load_again(model: ModelPatcher) -> mapped.Mapped:
    """Returns MODEL as its file gives it, with weights that are views of the mapped file."""
    loader, _, *index = model.cached_patcher_init
    return mapped.load_mapped(mapped.Mapped, loader, _arguments_with_dtype(model), index[0] if index else None)


def _arguments_with_dtype(model: ModelPatcher) -> tuple[Any, ...]:
    """Returns the arguments of MODEL's loader, with the dtype that ComfyUI chose by its own free memory: workers must
    not choose another."""
    loader, arguments, *_ = model.cached_patcher_init
    signature = inspect.signature(loader)
    bound = signature.bind(*arguments)
    if "model_options" in signature.parameters:
        dtype = model.model.get_dtype()
        bound.arguments["model_options"] = {**bound.arguments.get("model_options", {}), "dtype": dtype}
    bound.apply_defaults()
    return bound.args


def _argument_to_json(loader: Callable[..., Any], value: Any) -> dict[str, str]:
    """Returns a dtype or enum as JSON, for worker/comfy_loop/comfy_model.py. Raises Refused for other objects."""
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Enum):
        return {"enum": reference(type(value), "the loader"), "name": value.name}
    raise Refused("loader.argument", loader=qualified_name(loader), thing=qualified_name(type(value)))


def _check_first_seen(model: ModelPatcher, files: tuple[SourceFile, ...]) -> None:
    if runtime.first_seen.get(native_network(model), files) != files:
        raise Refused("model.changed", path=files[0].path)


def _spec_by_node(model: ModelPatcher) -> ModelSpec:
    """Returns the call of the node with which workers load this MODEL, and plain attributes of it that have changed
    since; or a CLIP's text encoder. Raises Refused, by the node's name, where they cannot call it."""
    if model.model not in _calls:
        raise Refused("model.nameless", kind=qualified_name(type(model)))
    node, inputs = _calls[model.model]
    is_network = isinstance(model.model, BaseModel)
    kind = "MODEL" if is_network else "CLIP"
    for name, value in inputs.items():
        if is_link(value):
            raise Refused("loader.linked", kind=kind, node=node, name=name)
    try:
        loader = reference(NODE_CLASS_MAPPINGS[node], f"the loader {node}")
    except code_names.Unsendable as unsendable:
        if not is_network:
            raise
        raise Refused("loader.foreign", reason=unsendable.sentence) from None
    folders = {name: list(paths) for name, (paths, *_) in folder_paths.folder_names_and_paths.items()}
    texts = [value for value in inputs.values() if isinstance(value, str)]
    files = {folder_paths.get_full_path(folder, text) for text in texts for folder in folders}
    pack_files = code_names.files_of(code_names.packs_named(loader))
    arguments = {"inputs": inputs, "folders": folders, "pack_files": pack_files, "kept": mapped.kept_dtypes(model)}
    spec = ModelSpec(
        loader=loader,
        arguments=json.dumps(arguments, sort_keys=True),
        files=tuple(stat_file(path) for path in sorted(filter(None, files))),
        dynamic_vram=model.is_dynamic(),
        weights_fingerprint=mapped.network_fingerprint(model),
        text_encoder=not is_network,
    )
    if not is_network:
        return spec
    dtype, attributes = model.model.get_dtype(), changed_since_made(model, node)
    return replace(spec, weight_dtype=str(dtype).removeprefix("torch."), attributes=attributes)


def describe_clip(clip: comfy.sd.CLIP) -> ModelSpec:
    """Returns what the workers load for this CLIP, without patches. Raises NotParallel, Refused."""
    if type(clip) is not comfy.sd.CLIP:
        raise NotParallel(say("clip.foreign", kind=qualified_name(type(clip))))
    for name in sorted(vars(clip).keys() & vars(comfy.sd.CLIP).keys()):  # a clone of the CLIP would lose it
        raise NotParallel(say("vae.code", what=f"CLIP.{name}", code=replaced_code.name_in_pack(vars(clip)[name])))
    patcher, encoder = clip.patcher, clip.cond_stage_model
    init: Any = getattr(patcher, "cached_patcher_init", None)  # older ComfyUIs have none of a CLIP
    by_node = init is None or not is_comfyui(init[0])
    check_encoder(patcher, of_pack=by_node)
    for kind in () if by_node else (type(patcher), type(encoder)):
        if kind is not mapped.Mapped and not is_comfyui(kind):
            raise NotParallel(say("clip.foreign", kind=qualified_name(kind)))
    if not any(True for _ in encoder.parameters()):
        raise NotParallel(say("clip.weightless", kind=qualified_name(type(encoder))))
    if by_node and encoder not in _calls:
        raise NotParallel(say("clip.nameless"))
    spec = _spec_by_node(patcher) if by_node else _clip_spec_by_loader(patcher, *init[:2])
    if runtime.first_seen.setdefault(encoder, spec.files) != spec.files:
        raise Refused("file.changed", path=spec.files[0].path)
    return spec


def _clip_spec_by_loader(patcher: ModelPatcher, loader: Callable[..., Any], arguments: tuple[Any, ...]) -> ModelSpec:
    paths = [arguments[0]] if isinstance(arguments[0], str) else arguments[0]
    for path in paths:
        if not os.path.exists(path):
            raise Refused("file.gone", path=path)
    given = list(arguments)
    for place, argument in enumerate(given):
        if isinstance(argument, dict):
            given[place] = {name: value for name, value in argument.items() if name not in DEVICES}
    return ModelSpec(
        loader=reference(loader, "the loader"),
        arguments=json.dumps(given, default=functools.partial(_argument_to_json, loader)),
        files=tuple(map(stat_file, paths)),
        dynamic_vram=mapped.has_dynamic_vram() and (type(patcher) is mapped.Mapped or patcher.is_dynamic()),
        weights_fingerprint=mapped.network_fingerprint(patcher),
        text_encoder=True,
    )


def check_encoder(patcher: ModelPatcher, *, of_pack: bool) -> None:
    """Raises NotParallel for a text encoder with code of other packs, or with anything on it but weight patches and
    hooks. What a pack's node has made may have its layers: workers call that node."""
    for name, code in (*(() if of_pack else foreign_layers(patcher.model)), *changes_of(patcher.model)):
        raise NotParallel(say("vae.code", what=name, code=replaced_code.name_in_pack(code)))
    if replaced := patcher.object_patches.keys() - {DTYPE}:
        raise NotParallel(say("clip.patched", what=min(replaced)))
    for name in INSIDE:
        if _holds(getattr(patcher, name, None)):
            raise NotParallel(say("clip.patched", what=name))


def describe_encoding(patcher: ModelPatcher, arguments: dict[str, Any], options: list[dict[str, Any]]) -> Described:
    """Describes a call of the text encoder, with the hooks in force. Raises Refused for what workers cannot have."""
    parts, hooks = describer(packs=False), patcher.get_combined_hook_patches(patcher.current_hooks)
    if hooks:
        check_code(replaced_code.MERGES)
    patches = {key: list(each) for key, each in hooks.items()}
    return parts.described(
        {
            "arguments": parts.describe(arguments, "the prompt"),
            "options": parts.describe(options, "the CLIP's options"),
            "hook_patches": parts.describe(patches, "the hooks of the CLIP"),
        }
    )


def with_patches(spec: ModelSpec, patcher: ModelPatcher) -> ModelSpec:
    """Returns the spec with the patches and the dtype of computation that the CLIP has now."""
    dtype = patcher.object_patches.get(DTYPE)
    compute_dtype = "" if dtype is None else str(dtype).removeprefix("torch.")
    return replace(
        spec, compute_dtype=compute_dtype, patches_fingerprint=str(patcher.patches_uuid) if patcher.patches else ""
    )


def _holds(value: Any) -> bool:
    """Is there anything in these dicts and lists?"""
    return any(map(_holds, value.values())) if isinstance(value, dict) else bool(value)
