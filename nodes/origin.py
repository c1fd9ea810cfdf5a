"""Where a MODEL came from: the loader that ComfyUI says would make it again, and the files that it reads."""

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

from ..parallel_runtime import gguf
from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.specs import ModelSpec, SourceFile
from .code import reference, title
from .files import SAFE, file_of, first_rows

PIECES = 16
PREFIXES = ("model.diffusion_model.", "")
WAY_OUT = "take the MODEL from Load Diffusion Model, Load Checkpoint or CP Load Diffusion Model"


def origin(model: ModelPatcher) -> ModelSpec:
    """What a worker calls to have this MODEL's network, nothing on it. Raises Refused where none can be named."""
    init = getattr(model, "cached_patcher_init", None)
    if init is None:
        raise Refused(_nameless(model))
    loader, arguments, *index = init
    files = _files(model, arguments)
    name, arguments = _call(loader, arguments, model.model.get_dtype())
    return ModelSpec(
        loader=name,
        arguments=json.dumps(arguments, sort_keys=True, default=partial(_in_json, loader)),
        index=index[0] if index else None,
        files=files,
        weight_dtype=str(model.model.get_dtype()).removeprefix("torch."),
    )


def _call(loader: Callable[..., Any], arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[str, tuple[Any, ...]]:
    if loader is gguf.load:
        return gguf.LOADER, arguments[1:]  # the class of the patcher is each side's own
    try:
        name = reference(loader, "the loader")
    except Refused as refused:
        raise Refused(f"{refused}; {WAY_OUT}") from None
    return name, _settled(loader, arguments, dtype)


def _nameless(model: ModelPatcher) -> str:
    if type(model).__name__ == gguf.PATCHER:
        return ("this MODEL of ComfyUI-GGUF does not say which file it came from; load the .gguf with "
                "CP Load Diffusion Model, which uses that pack's loader")  # fmt: skip
    return f"this MODEL ({title(type(model))}) does not say which file it came from; {WAY_OUT}"


def _settled(loader: Callable[..., Any], arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments with ComfyUI's choice of dtype: it goes by free memory, and each worker has its own."""
    bound = inspect.signature(loader).bind(*arguments)
    if "model_options" in inspect.signature(loader).parameters:
        bound.arguments["model_options"] = {**bound.arguments.get("model_options", {}), "dtype": dtype}
    bound.apply_defaults()
    return bound.args


def _in_json(loader: Callable[..., Any], value: Any) -> dict[str, str]:
    """What JSON has no form for. The other side is worker/comfy_loop/loading.py."""
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    raise Refused(f"the loader {title(loader)} was given a {title(type(value))}, which workers cannot have; {WAY_OUT}")


def _files(model: ModelPatcher, arguments: tuple[Any, ...]) -> tuple[SourceFile, ...]:
    """The files as they were when MODEL was first seen. Raises Refused where they are others now."""
    named = [value for value in arguments if isinstance(value, str)]
    paths = [name for name in named if os.path.isabs(name) and os.path.splitext(name)[1]]
    for path in paths:
        if not os.path.exists(path):
            raise Refused(f"the file of this MODEL is gone: {path}")
    now = tuple(file_of(path) for path in paths if os.path.isfile(path))
    if model.model not in runtime.first_seen and all(_still_holds(file.path, model) for file in now):
        runtime.first_seen[model.model] = now
    if runtime.first_seen.get(model.model) != now:
        raise Refused(f"{now[0].path} changed on disk after this MODEL was loaded from it; have ComfyUI load it again: "
                      "Unload models and free the node cache, or restart")  # fmt: skip
    return now


def _still_holds(path: str, model: ModelPatcher) -> bool:
    """Compares the first rows of some weights, from all over the model. False where most of them differ.

    A weight with a LoRA in it is no witness, nor is one that the loader holds under another name or in another shape.
    """
    if not path.endswith(SAFE):
        return True
    slots = dict(model.model.diffusion_model.named_parameters())
    patched = {key.removeprefix("diffusion_model.") for key in (*model.patches, *model.backup)}
    with safe_open(path, framework="pt", device="cpu") as file:
        names = set(file.keys())
        prefix = next(prefix for prefix in PREFIXES if not prefix or any(name.startswith(prefix) for name in names))
        known = [name for name in slots if prefix + name in names and name not in patched and slots[name].ndim > 1]
        rows = first_rows(file, ((prefix + name, slots[name]) for name in known[:: max(1, len(known) // PIECES)]))
    differing = sum(not torch.equal(row.to(held.dtype), held) for row, held in rows)
    return 2 * differing <= len(rows)
