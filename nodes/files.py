"""Files that models were loaded from: what pins one, and how a model's weights are compared with it.

Of a model that lies on a MODEL as a patch nobody says which file it came from: Load Model Patch does not, so its folder
is searched. A file is the one when the first rows of its weights are the model's, as it was when the model was first
seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from safetensors import safe_open
from torch import Tensor

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.specs import SourceFile

SAFE = (".safetensors", ".sft")
FOLDER = "model_patches"


def file_of(path: str) -> SourceFile:
    """It as it is now. Raises FileNotFoundError."""
    stat = os.stat(path)
    return SourceFile(path=os.path.realpath(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def first_rows(file: Any, slots: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """An open file's and a model's, of weights by their names in the file: where a weight can hold the very numbers of
    the file's, but for their dtype."""
    return [
        (file.get_slice(name)[:1], slot[:1].detach().cpu())
        for name, slot in slots
        if type(slot.data) is Tensor and not slot.is_meta and list(slot.shape) == file.get_slice(name).get_shape()
    ]


def patch_file(model: ModelPatcher) -> dict[str, Any]:
    """The words for a model that ModelPatchLoader makes: `path`, the `size` and `mtime_ns` that pin it, and whether its
    weights are the file's, `assigned`, or copies in the dtype of its class. Raises LookupError saying why workers
    cannot have it, Refused where its file is another one now."""
    if model.patches or model.object_patches or model.hook_patches:
        raise LookupError("it is patched itself")
    if model.model not in runtime.first_seen:
        runtime.first_seen[model.model] = (_search(model.model),)
    (file,) = runtime.first_seen[model.model]
    try:
        now = _named(file.path)
    except FileNotFoundError:
        raise Refused(f"the file of this model patch is gone: {file.path}") from None
    if now != file:
        raise Refused(
            f"{file.path} changed on disk after this model patch was loaded from it; run Load Model Patch again"
        )
    return {"kind": "model_patch", **asdict(file), "assigned": model.is_dynamic()}


def _search(model: torch.nn.Module) -> SourceFile:
    for name in folder_paths.get_filename_list(FOLDER):
        path = folder_paths.get_full_path(FOLDER, name)
        if path is not None and path.endswith(SAFE) and _holds(path, model):
            return _named(path)
    raise LookupError(f"no file in models/{FOLDER} has its weights")


def _named(path: str) -> SourceFile:
    """The file behind this name, under it: ComfyUI goes by how a name ends. Raises FileNotFoundError."""
    return replace(file_of(path), path=path)


def _holds(path: str, model: torch.nn.Module) -> bool:
    """Does the file have most of the model's weights, none of them with another first row, and most of them to the bit?
    The loader renames and joins some, and rounds some, but not to another dtype than most of the file's."""
    slots = dict(model.named_parameters())
    with safe_open(path, framework="pt", device="cpu") as file:
        names = {part: name for name in file.keys() for part in (name.partition(".")[2], name)}  # noqa: SIM118 - not a dict
        known = ((names[name], slot) for name, slot in slots.items() if name in names and slot.ndim)
        rows = first_rows(file, known)
    if 2 * len(rows) <= len(slots) or not all(torch.equal(row.to(held.dtype), held) for row, held in rows):
        return False
    return 2 * sum(torch.equal(row.double(), held.double()) for row, held in rows) > len(rows)
