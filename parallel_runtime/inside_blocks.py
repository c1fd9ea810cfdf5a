"""ComfyUI's patches between a network's blocks and inside of them: which need all tokens, and which of its own see each
token, or each frame, by itself, and are the same on a part.

Knows functions and classes by their names. Imports no torch, no ComfyUI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import Refused

BEFORE = {"post_input"}
BETWEEN = {"double_block", "single_block", "noise_refiner"}
OF_UNETS = {
    "input_block_patch", "input_block_patch_after_skip", "output_block_patch", "middle_patch", "middle_block_patch",
    "middle_block_after_patch", "emb_patch", "forward_timestep_embed_patch",
}  # fmt: skip  # called by no network of tokens
INSIDE = ("attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch", "mlp_patch")
EACH_TOKEN = (
    "comfy_extras.nodes_nag.NAGuidance.execute.<locals>.nag_attention_output_patch",
    "comfy.ldm.anima.lllite.AnimaLLLiteAttentionPatch",
    "comfy.ldm.anima.lllite.AnimaLLLiteMLPPatch",
)

OF_FRAMES = ("comfy.ldm.wan.model_multitalk.MultiTalkCrossAttnPatch",)  # which reshape their tokens by frames


def wants_whole(options: Mapping[str, Any]) -> bool:
    """Must tokens be whole between blocks for what `transformer_options` brings? Refused where that is not enough."""
    given = options.get("patches") or {}
    patches = {kind for kind, functions in given.items() if functions}
    if inside := sorted(patches - BEFORE - BETWEEN - OF_UNETS - set(INSIDE)) + see_all_tokens(given):
        raise Refused(
            f"{', '.join(inside)} would run inside blocks, where a worker holds a part of the tokens; take the node "
            "that sets it away, or set ring and Ulysses degrees to 1"
        )
    return bool(patches & BETWEEN) or bool((options.get("patches_replace") or {}).get("dit"))


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
