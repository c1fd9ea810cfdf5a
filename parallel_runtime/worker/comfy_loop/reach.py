"""What of ComfyUI's transformer_options a network can see: all of it is part of what a recording is known by."""

from __future__ import annotations

from typing import Any

from comfy.patcher_extension import WrappersMP
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..models import Unrecordable

OPTIONS = "transformer_options"
OVERRIDE = "optimized_attention_override"
UNSEEN = ("uuids", "callbacks")  # of conditions, and of the loop around the network
OUTSIDE = {value for name, value in vars(WrappersMP).items() if name.isupper()} - {WrappersMP.DIFFUSION_MODEL}


def reaching(kwargs: dict[str, Any], attention: Any) -> dict[str, Any]:
    """`kwargs` of a network's call without what its code does not ask for; `attention` is an override of our own.

    Raises Unrecordable for code that runs inside the network: it may decide by value, or be another from step to step;
    and for tensors in lists or dicts, where the network may keep what it made, as causal Wan does.
    """
    if (given := kwargs.get(OPTIONS)) is None:
        return kwargs
    options = {name: value for name, value in given.items() if name not in UNSEEN}
    wrappers = {kind: found for kind, found in options.pop("wrappers", {}).items() if kind not in OUTSIDE}
    inside = {
        "wrappers": _kinds(wrappers),
        "patches": _kinds(options.get("patches")),
        "replaced blocks": _kinds(options.get("patches_replace")),
    }
    for what, kinds in inside.items():
        if kinds:
            raise Unrecordable(f"{what} inside the network ({', '.join(kinds)})")
    if options.get(OVERRIDE) is not attention:
        raise Unrecordable("a node replaces the attention")
    for name, value in options.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value) if leaf is not value):
            raise Unrecordable(f"the network may keep something in {name}")
    return {**kwargs, OPTIONS: options}


def _kinds(found: dict[str, Any] | None) -> list[str]:
    return sorted(str(kind) for kind, functions in (found or {}).items() if functions)
