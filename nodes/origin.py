"""Whether a file still holds the weights of the MODEL that was loaded from it."""

from __future__ import annotations

import torch
from comfy.model_patcher import ModelPatcher
from safetensors import safe_open
from torch import Tensor

from ..parallel_runtime.families.base import Family
from ..parallel_runtime.families.header import header

PIECES = 16


def still_holds(path: str, model: ModelPatcher) -> bool:
    """Compares the first rows of some weights, from all over the model. False where most of them differ.

    A MODEL whose weights are not here is no witness, nor is a weight with a LoRA in it.
    """
    slots = dict(model.model.diffusion_model.named_parameters())
    patched = {key.removeprefix("diffusion_model.") for key in (*model.patches, *model.backup)}
    head = header(path)
    named = {name: Family.comfy_name(name) for name, shape in head.shapes.items() if len(shape) > 1}
    known = [
        (name, slots[called])
        for name, called in named.items()
        if called in slots and called not in patched and _comparable(slots[called], head.shapes[name])
    ]
    chosen = known[:: max(1, len(known) // PIECES)]
    with safe_open(path, framework="pt", device="cpu") as file:
        rows = [(file.get_slice(head.prefix + name)[:1], slot[:1]) for name, slot in chosen]
    differing = sum(not torch.equal(row.to(slot.dtype), slot.detach().cpu()) for row, slot in rows)
    return 2 * differing <= len(rows)


def _comparable(slot: Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(slot.shape) == tuple(shape) and not slot.is_meta
