"""Describes where a MODEL came from: the loader call that makes it again (`cached_patcher_init`), and its files."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from safetensors import safe_open

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.loading import gguf
from ...parallel_runtime.specs import ModelSpec, SourceFile
from .comfy_objects import qualified_name, reference
from .model_files import SAFETENSORS, first_slices, stat_file

COMPARED_WEIGHTS = 16
PREFIXES = ("model.diffusion_model.", "")


def model_spec(model: ModelPatcher) -> ModelSpec:
    """Returns the call with which a worker loads this MODEL's network, without patches. Raises Refused where that is
    unknown."""
    init = getattr(model, "cached_patcher_init", None)
    if init is None:
        if type(model).__name__ == gguf.PATCHER:
            raise Refused("model.gguf")
        raise Refused("model.nameless", kind=qualified_name(type(model)))
    loader, arguments, *index = init
    files = _files(model, arguments)
    name, arguments = _loader_call(loader, arguments, model.model.get_dtype())
    return ModelSpec(
        loader=name,
        arguments=json.dumps(arguments, sort_keys=True, default=partial(_to_json, loader)),
        index=index[0] if index else None,
        files=files,
        weight_dtype=str(model.model.get_dtype()).removeprefix("torch."),
    )


def is_gguf(model: ModelPatcher) -> bool:
    """Is this a MODEL that CP Load Diffusion Model has made of a GGUF file?"""
    init = getattr(model, "cached_patcher_init", None)
    return init is not None and init[0] is gguf.load


def _loader_call(
    loader: Callable[..., Any], arguments: tuple[Any, ...], dtype: torch.dtype
) -> tuple[str, tuple[Any, ...]]:
    if loader is gguf.load:
        return gguf.LOADER, arguments[1:]  # workers use another class of patcher
    try:
        name = reference(loader, "the loader")
    except Refused as refused:
        raise Refused("loader.foreign", reason=refused.sentence) from None
    return name, _with_dtype(loader, arguments, dtype)


def _with_dtype(loader: Callable[..., Any], arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Adds the dtype that ComfyUI chose by its own free memory to the arguments: workers must not choose another."""
    bound = inspect.signature(loader).bind(*arguments)
    if "model_options" in inspect.signature(loader).parameters:
        bound.arguments["model_options"] = {**bound.arguments.get("model_options", {}), "dtype": dtype}
    bound.apply_defaults()
    return bound.args


def _to_json(loader: Callable[..., Any], value: Any) -> dict[str, str]:
    """Returns a dtype as JSON, which worker/comfy_loop/comfy_model.py reads. Raises Refused for any other object."""
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    raise Refused("loader.argument", loader=qualified_name(loader), thing=qualified_name(type(value)))


def _files(model: ModelPatcher, arguments: tuple[Any, ...]) -> tuple[SourceFile, ...]:
    """Returns the files among the arguments. Raises Refused where one has changed since MODEL was first seen."""
    named = [value for value in arguments if isinstance(value, str)]
    paths = [name for name in named if os.path.isabs(name) and os.path.splitext(name)[1]]
    for path in paths:
        if not os.path.exists(path):
            raise Refused("model.gone", path=path)
    files = tuple(stat_file(path) for path in paths if os.path.isfile(path))
    if model.model not in runtime.first_seen and all(_still_has_weights(file.path, model) for file in files):
        runtime.first_seen[model.model] = files
    if runtime.first_seen.get(model.model) != files:
        raise Refused("model.changed", path=files[0].path)
    return files


def _still_has_weights(path: str, model: ModelPatcher) -> bool:
    """Do most of COMPARED_WEIGHTS weights, from all over the model, have the file's first slices?

    Weights with a LoRA in them, and those that the loader renames or reshapes, are not compared.
    """
    if not path.endswith(SAFETENSORS):
        return True
    slots = dict(model.model.diffusion_model.named_parameters())
    patched = {key.removeprefix("diffusion_model.") for key in (*model.patches, *model.backup)}
    with safe_open(path, framework="pt", device="cpu") as file:
        names = set(file.keys())
        prefix = next(prefix for prefix in PREFIXES if not prefix or any(name.startswith(prefix) for name in names))
        known = [name for name in slots if prefix + name in names and name not in patched and slots[name].ndim > 1]
        compared = known[:: max(1, len(known) // COMPARED_WEIGHTS)]
        slices = first_slices(file, ((prefix + name, slots[name]) for name in compared))
    differing = sum(not torch.equal(part.to(weight.dtype), weight) for part, weight in slices)
    return 2 * differing <= len(slices)
