"""ComfyUI's own patches that run inside of blocks: which of them see each token, or each frame, by itself, and are the
same on a part.

Knows functions and classes by their names. Imports no torch, no ComfyUI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

INSIDE = ("attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch", "mlp_patch")
EACH_TOKEN = (
    "comfy_extras.nodes_nag.NAGuidance.execute.<locals>.nag_attention_output_patch",
    "comfy.ldm.anima.lllite.AnimaLLLiteAttentionPatch",
    "comfy.ldm.anima.lllite.AnimaLLLiteMLPPatch",
)

OF_FRAMES = ("comfy.ldm.wan.model_multitalk.MultiTalkCrossAttnPatch",)  # which reshape their tokens by frames


def see_all_tokens(patches: Mapping[str, Sequence[Any]]) -> list[str]:
    """What of these, by kind as ComfyUI has them, needs all tokens inside of blocks: "attn1_patch of HyperTile"."""
    found = ((kind, patch) for kind in INSIDE for patch in patches.get(kind) or ())
    cut = EACH_TOKEN + OF_FRAMES
    return list(dict.fromkeys(f"{kind} of {_owner(patch)}" for kind, patch in found if not _is_one_of(cut, patch)))


def are_inside(patches: Mapping[str, Sequence[Any]]) -> bool:
    """Whether any of these runs inside of blocks."""
    return any(patches.get(kind) for kind in INSIDE)


def goes_by_frames(patch: Any) -> bool:
    """Is it the same on a part of the tokens that is whole frames?"""
    return _is_one_of(OF_FRAMES, patch)


def _is_one_of(names: Sequence[str], patch: Any) -> bool:
    return any(f".{_name(patch)}".endswith(f".{known}") for known in names)


def _owner(patch: Any) -> str:
    """The node that has it inside, or the class."""
    named: str = _named(patch).__qualname__
    return named.partition(".")[0]


def _name(patch: Any) -> str:
    """ComfyUI imports its extra nodes under the path of their file."""
    named = _named(patch)
    return f"{named.__module__.replace(os.sep, '.')}.{named.__qualname__}"


def _named(patch: Any) -> Any:
    return patch if hasattr(patch, "__qualname__") else type(patch)
