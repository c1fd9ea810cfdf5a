"""The files that models were loaded from, and how a model's weights are compared with a file.

ComfyUI's loaders of model patches, ControlNets, GLIGEN and hypernetworks do not keep the file of their model, so the
folder is searched for the one whose weights have the same first slices, when the model is first seen. Names are no
help: loaders rename weights, take prefixes off, and join q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import folder_paths
import torch
from comfy.gligen import Gligen
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.loading.fingerprint import check_unchanged, stat_file
from ...parallel_runtime.specs import SourceFile
from .foreign_code import GLIGEN, check_code

SAFETENSORS = (".safetensors", ".sft")
FOLDER = "model_patches"
GLIGEN_FOLDER, HYPERNETWORK_FOLDER = "gligen", "hypernetworks"
UNPICKLING_ERROR = torch.serialization.pickle.UnpicklingError  # torch.load raises it for a file of more than weights
# The shape without the first dim, the dtype, and the numbers of the first slice along it.
WeightSlice = tuple[tuple[int, ...], torch.dtype, bytes]


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
    file = source_file(FOLDER, model.model, model.model.parameters())
    return {"kind": "model_patch", **asdict(file), "assigned": model.is_dynamic()}


def gligen_file(network: Gligen) -> dict[str, Any]:
    """Describes the network of GLIGENLoader: its SourceFile, and the dtype that it has in ComfyUI. Raises LookupError
    where no file has its weights, Refused where the file has changed, Unsendable where a pack has replaced its code."""
    check_code(GLIGEN)
    file = source_file(GLIGEN_FOLDER, network, network.parameters())
    dtype = next(network.parameters()).dtype
    return {"kind": "gligen", **asdict(file), "dtype": str(dtype).removeprefix("torch.")}


def hypernetwork_file(patch: Any) -> dict[str, Any]:
    """Describes the patch of HypernetworkLoader: its SourceFile and strength. Raises LookupError where no file has its
    weights, Refused where the file has changed."""
    weights = (weight for layers in patch.hypernet.values() for weight in layers.parameters())
    file = source_file(HYPERNETWORK_FOLDER, patch, weights)
    return {"kind": "hypernetwork", **asdict(file), "strength": patch.strength}


def source_file(folder: str, owner: object, weights: Iterable[Tensor]) -> SourceFile:
    """Returns the file in models/`folder` that `weights` were loaded from, searched once for their `owner`. Raises
    LookupError where no file has them, Refused where the file has changed since."""
    if owner not in runtime.first_seen:
        runtime.first_seen[owner] = (find_file(folder, weights),)
    (file,) = runtime.first_seen[owner]
    check_unchanged(file)
    return file


def find_file(folder: str, weights: Iterable[Tensor]) -> SourceFile:
    """Returns the file in models/`folder` with the first slices of more than half of `weights`: of several files the
    one that has most of them, and most to the bit, since loaders round. Raises LookupError."""
    slices = {first for weight in weights for first in _first_slice(weight)}
    candidates: list[tuple[float, float, str]] = []
    for name in folder_paths.get_filename_list(folder) if slices else ():
        path = folder_paths.get_full_path(folder, name)
        if path is not None and (matches := _count_matches(path, slices))[0] > len(slices) / 2:
            candidates.append((*matches, path))
    if not candidates:
        raise LookupError(f"no file in models/{folder} has its weights")
    return stat_file(max(candidates, key=lambda candidate: candidate[:2])[2])


def _count_matches(path: str, slices: set[WeightSlice]) -> tuple[int, int]:
    """Counts the `slices` that the file has once rounded to their dtype, and those that it has to the bit."""
    shapes: dict[tuple[int, ...], set[torch.dtype]] = {}
    for shape, dtype, _ in slices:
        shapes.setdefault(shape, set()).add(dtype)
    rounded, exact = set(), set()
    for first in _first_slices_in(path, shapes.keys()):
        for dtype in shapes[tuple(first.shape[1:])]:
            cast = first.to(dtype)
            matching = set(_first_slice(cast)) & slices
            rounded |= matching
            if matching and torch.equal(cast.double(), first.double()):
                exact |= matching
    return len(rounded), len(exact)


def _first_slice(weight: Tensor) -> Iterator[WeightSlice]:
    """Yields a weight's first slice, if it identifies a file: none for a vector, a constant, a quantized weight, or one
    that is not in memory."""
    if weight.ndim < 2 or not weight.numel() or weight.is_meta or type(weight.data) is not Tensor:
        return
    first = weight[:1].detach().cpu().flatten()
    if first.dtype.is_floating_point and first.numel() > 1 and bool((first.float() != first[0].float()).any()):
        yield tuple(weight.shape[1:]), weight.dtype, first.float().numpy().tobytes()


def _first_slices_in(path: str, shapes: Iterable[tuple[int, ...]]) -> Iterator[Tensor]:
    """Yields the first slices [1, ...] of a file's weights whose shapes, less the first dim, are in `shapes`. The file
    is mapped, not read; one that cannot be mapped yields nothing."""
    slice_shapes = set(shapes)
    try:
        if path.endswith(SAFETENSORS):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    if tuple(part.get_shape()[1:]) in slice_shapes and 0 not in part.get_shape():
                        yield part[:1]
            return
        for weight in tree_leaves(torch.load(path, map_location="cpu", mmap=True, weights_only=True)):
            if isinstance(weight, Tensor) and weight.ndim > 1 and tuple(weight.shape[1:]) in slice_shapes:
                yield weight[:1]
    except (SafetensorError, OSError, RuntimeError, UNPICKLING_ERROR):
        return
