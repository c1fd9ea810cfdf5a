"""Describes a CLIP and a call of its text encoder for the workers, or says why ComfyUI's own process runs it."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import comfy.sd
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...parallel_runtime.errors import Refused, say
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.jobs import Described
from ...parallel_runtime.loading.code_names import is_comfyui, qualified_name, reference
from ...parallel_runtime.loading.fingerprint import stat_file, structure_fingerprint
from ...parallel_runtime.loading.mapped import Mapped, has_dynamic_vram, network_fingerprint
from ...parallel_runtime.loading.replaced_code import MERGES, name_in_pack
from ...parallel_runtime.specs import ModelSpec, SourceFile
from .foreign_code import changes_of, check_code, foreign_layers
from .model import argument_to_json
from .model_files import describer
from .vae import NotParallel

DTYPE = "manual_cast_dtype"  # ComfyUI replaces it on each CLIP: encoders compute in it
DEVICES = {"load_device", "offload_device", "initial_device"}  # options of loaders; workers have their own
INSIDE = ("injections", "weight_wrapper_patches", "wrappers", "callbacks", "additional_models")  # of a patcher

_made: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # the fingerprint of a text encoder as it was loaded


def note_weights() -> None:
    """Has ComfyUI note samples of a text encoder's weights as it loads them: nodes may change them in place."""
    load_weights = comfy.sd.CLIP.load_sd

    @functools.wraps(load_weights)
    def noting(clip: comfy.sd.CLIP, *args: Any, **kwargs: Any) -> Any:
        keys = load_weights(clip, *args, **kwargs)
        _made[clip.cond_stage_model] = network_fingerprint(clip.patcher)
        return keys

    comfy.sd.CLIP.load_sd = noting


def check_weights(patcher: ModelPatcher) -> None:
    """Raises NotParallel for a text encoder whose layers or weights are not as ComfyUI has loaded them, but for
    patches."""
    made = _made.get(patcher.model)
    if made is not None and made != network_fingerprint(patcher):
        raise NotParallel(say("clip.edited", kind=qualified_name(type(patcher.model))))


def describe_clip(clip: comfy.sd.CLIP) -> ModelSpec:
    """Returns what the workers load for this CLIP, without patches. Raises NotParallel, Refused."""
    mapped = type(getattr(clip, "patcher", None)) is Mapped
    if type(clip) is not comfy.sd.CLIP or not (mapped or is_comfyui(type(clip.patcher))):
        kind = type(clip.patcher if type(clip) is comfy.sd.CLIP else clip)
        raise NotParallel(say("clip.foreign", kind=qualified_name(kind)))
    patcher, encoder = clip.patcher, clip.cond_stage_model
    check_encoder(patcher)
    check_weights(patcher)
    if not is_comfyui(encoder):
        raise NotParallel(say("clip.foreign", kind=qualified_name(type(encoder))))
    if not any(True for _ in encoder.parameters()):
        raise NotParallel(say("clip.weightless", kind=qualified_name(type(encoder))))
    init = getattr(patcher, "cached_patcher_init", None)  # older ComfyUIs have none of a CLIP
    if init is None:
        raise NotParallel(say("clip.nameless"))
    loader, arguments, *_ = init
    return ModelSpec(
        loader=reference(loader, "the loader"),
        arguments=json.dumps([*map(_without_devices, arguments)], default=partial(argument_to_json, loader)),
        files=_files(encoder, arguments[0]),
        dynamic_vram=has_dynamic_vram() and (mapped or patcher.is_dynamic()),
        weights_fingerprint=structure_fingerprint(encoder),
        text_encoder=True,
    )


def check_encoder(patcher: ModelPatcher) -> None:
    """Raises NotParallel for a text encoder with code of other packs, or with anything on it but weight patches and
    hooks."""
    for name, code in (*foreign_layers(patcher.model), *changes_of(patcher.model)):
        raise NotParallel(say("vae.code", what=name, code=name_in_pack(code)))
    if replaced := patcher.object_patches.keys() - {DTYPE}:
        raise NotParallel(say("clip.patched", what=min(replaced)))
    for name in INSIDE:
        if _holds(getattr(patcher, name, None)):
            raise NotParallel(say("clip.patched", what=name))


def describe_encoding(patcher: ModelPatcher, arguments: dict[str, Any], options: list[dict[str, Any]]) -> Described:
    """Describes a call of the text encoder, with the hooks in force. Raises Refused for what workers cannot have."""
    parts, hooks = describer(packs=False), patcher.get_combined_hook_patches(patcher.current_hooks)
    if hooks:
        check_code(MERGES)
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
    return replace(
        spec,
        compute_dtype="" if dtype is None else str(dtype).removeprefix("torch."),
        patches_fingerprint=str(patcher.patches_uuid) if patcher.patches else "",
    )


def _without_devices(argument: Any) -> Any:
    if not isinstance(argument, dict):
        return argument
    return {name: value for name, value in argument.items() if name not in DEVICES}


def _files(encoder: Any, named: str | list[str]) -> tuple[SourceFile, ...]:
    """Returns the files of a loader's argument. Raises Refused where one has changed since the CLIP was first seen."""
    paths = [named] if isinstance(named, str) else named
    for path in paths:
        if not os.path.exists(path):
            raise Refused("file.gone", path=path)
    files = tuple(map(stat_file, paths))
    if runtime.first_seen.setdefault(encoder, files) != files:
        raise Refused("file.changed", path=paths[0])
    return files


def _holds(value: Any) -> bool:
    """Is there anything in these dicts and lists?"""
    return any(map(_holds, value.values())) if isinstance(value, dict) else bool(value)
