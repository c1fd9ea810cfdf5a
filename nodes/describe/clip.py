"""Describes a CLIP and a call of its text encoder for the workers, or says why ComfyUI's own process runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.sd
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.errors import Refused, say
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.jobs import Described
from ...parallel_runtime.loading.code_names import is_comfyui, qualified_name, reference
from ...parallel_runtime.loading.fingerprint import stat_file
from ...parallel_runtime.loading.mapped import Mapped, has_dynamic_vram, network_fingerprint
from ...parallel_runtime.loading.replaced_code import MERGES, name_in_pack
from ...parallel_runtime.specs import ModelSpec
from .foreign_code import changes_of, check_code, foreign_layers
from .model import argument_to_json
from .model_files import describer
from .model_source import is_noted, spec_by_node
from .vae import NotParallel

DTYPE = "manual_cast_dtype"  # ComfyUI replaces it on each CLIP: encoders compute in it
DEVICES = {"load_device", "offload_device", "initial_device"}  # options of loaders; workers have their own
INSIDE = ("injections", "weight_wrapper_patches", "wrappers", "callbacks", "additional_models")  # of a patcher


def check_weights(patcher: ModelPatcher, spec: ModelSpec) -> None:
    """Raises Refused for a text encoder whose layers or weights, but for patches, are not as they were described. Those
    that were changed before, workers find when they load its files."""
    if network_fingerprint(patcher) != spec.weights_fingerprint:
        raise Refused("clip.edited", title=spec.title)


def describe_clip(clip: comfy.sd.CLIP) -> ModelSpec:
    """Returns what the workers load for this CLIP, without patches. Raises NotParallel, Refused."""
    if type(clip) is not comfy.sd.CLIP:
        raise NotParallel(say("clip.foreign", kind=qualified_name(type(clip))))
    for name in sorted(vars(clip).keys() & vars(comfy.sd.CLIP).keys()):  # a clone of the CLIP would lose it
        raise NotParallel(say("vae.code", what=f"CLIP.{name}", code=name_in_pack(vars(clip)[name])))
    patcher, encoder = clip.patcher, clip.cond_stage_model
    init: Any = getattr(patcher, "cached_patcher_init", None)  # older ComfyUIs have none of a CLIP
    by_node = init is None or not is_comfyui(init[0])
    check_encoder(patcher, of_pack=by_node)
    for kind in () if by_node else (type(patcher), type(encoder)):
        if kind is not Mapped and not is_comfyui(kind):
            raise NotParallel(say("clip.foreign", kind=qualified_name(kind)))
    if not any(True for _ in encoder.parameters()):
        raise NotParallel(say("clip.weightless", kind=qualified_name(type(encoder))))
    if by_node and not is_noted(encoder):
        raise NotParallel(say("clip.nameless"))
    spec = spec_by_node(patcher) if by_node else _spec_by_loader(patcher, *init[:2])
    if runtime.first_seen.setdefault(encoder, spec.files) != spec.files:
        raise Refused("file.changed", path=spec.files[0].path)
    return spec


def _spec_by_loader(patcher: ModelPatcher, loader: Callable[..., Any], arguments: tuple[Any, ...]) -> ModelSpec:
    paths = [arguments[0]] if isinstance(arguments[0], str) else arguments[0]
    for path in paths:
        if not os.path.exists(path):
            raise Refused("file.gone", path=path)
    return ModelSpec(
        loader=reference(loader, "the loader"),
        arguments=json.dumps([*map(_without_devices, arguments)], default=partial(argument_to_json, loader)),
        files=tuple(map(stat_file, paths)),
        dynamic_vram=has_dynamic_vram() and (type(patcher) is Mapped or patcher.is_dynamic()),
        weights_fingerprint=network_fingerprint(patcher),
        text_encoder=True,
    )


def check_encoder(patcher: ModelPatcher, *, of_pack: bool) -> None:
    """Raises NotParallel for a text encoder with code of other packs, or with anything on it but weight patches and
    hooks. What a pack's node has made may have its layers: workers call that node."""
    for name, code in (*(() if of_pack else foreign_layers(patcher.model)), *changes_of(patcher.model)):
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


def _holds(value: Any) -> bool:
    """Is there anything in these dicts and lists?"""
    return any(map(_holds, value.values())) if isinstance(value, dict) else bool(value)
