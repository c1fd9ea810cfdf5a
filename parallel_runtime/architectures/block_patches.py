"""Which patches of ComfyUI and of packs need all tokens, and which work on each token, or each frame, alone and so can
run on a split sequence. Others get gathered tokens between blocks, and inside of blocks keep a network undivided; on
UNets they get gathered rows. A kind of patch that is not named here is refused.

Knows functions and classes by their names. Imports no torch, no ComfyUI."""

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Refused

BEFORE = {"post_input"}
BETWEEN = {"double_block", "single_block", "noise_refiner"}
OF_UNETS = {
    "input_block_patch", "input_block_patch_after_skip", "output_block_patch", "middle_patch", "middle_block_patch",
    "middle_block_after_patch", "emb_patch", "forward_timestep_embed_patch",
}  # fmt: skip  # called by no network of tokens
INSIDE = ("attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch", "mlp_patch")
# Functions and classes by the end of module.qualname. A pack's module is custom_nodes.FOLDER.MODULE, with "_x_" for
# each dot in FOLDER. A functools.partial has no name.
EACH_TOKEN = (
    "comfy_extras.nodes_nag.NAGuidance.execute.<locals>.nag_attention_output_patch",
    "comfy.ldm.anima.lllite.AnimaLLLiteAttentionPatch",
    "comfy.ldm.anima.lllite.AnimaLLLiteMLPPatch",
)

EACH_HEAD = ("comfy_extras.nodes_sparse_attention.make_attention_override.<locals>.override",)
DECLARED = "context_parallel"  # the attribute by which a pack says how its function computes: docs/scripts.md
OF_COMFYUI = "comfy.model_patcher.ModelPatcher.set_model_optimized_attention.<locals>.optimized_attention_override"
OF_FRAMES = ("comfy.ldm.wan.model_multitalk.MultiTalkCrossAttnPatch",)  # which reshape their tokens by frames


def needs_full_tokens(options: Mapping[str, Any]) -> bool:
    """Whether patches in `transformer_options` need full tokens between blocks. Raises Refused for ones inside,
    for which nodes/describe/model.py leaves a network undivided before, by see_all_tokens."""
    all_patches = options.get("patches") or {}
    patches = {kind for kind, functions in all_patches.items() if functions}
    if inside := sorted(patches - BEFORE - BETWEEN - OF_UNETS - set(INSIDE)) + see_all_tokens(all_patches):
        raise Refused("blocks.inside", widget="ring_degree", names=", ".join(inside))
    between = [function for kind in patches & BETWEEN for function in all_patches[kind]]
    replaces_blocks = bool((options.get("patches_replace") or {}).get("dit"))  # the first of which gets full tokens
    return replaces_blocks or not all(map(sees_each_token, between))


def see_all_tokens(patches: Mapping[str, Sequence[Any]]) -> list[str]:
    """Returns the patches, with ComfyUI's kind, that need all tokens inside of blocks: "attn1_patch of HyperTile"."""
    inside = ((kind, patch) for kind in INSIDE for patch in patches.get(kind) or ())
    whole = ((kind, patch) for kind, patch in inside if not (sees_each_token(patch) or goes_by_frames(patch)))
    # A function is told by the node that defines it, an object by its class.
    owners = ((kind, _named(patch).__qualname__.partition(".")[0]) for kind, patch in whole)
    return list(dict.fromkeys(f"{kind} of {owner}" for kind, owner in owners))


def sees_each_token(function: Any) -> bool:
    """Whether `function` gives the same on any part of the tokens: a known one of ComfyUI's, or one that says so."""
    return _declared(function) == "each token" or _is_one_of(EACH_TOKEN, function)


def attends_each_head(override: Any) -> bool:
    """Whether an override gives the same on a part of the heads: a known one, or one that says so."""
    home = getattr(override, "__globals__", {}).get("__name__", _named(override).__module__)
    if _is_one_of(EACH_HEAD, override):
        names = override.__code__.co_freevars
        previous = override.__closure__[names.index("previous")].cell_contents
        return previous is None or attends_each_head(previous)
    says_so = _declared(override) == "each head"
    return str(home).startswith("comfy.") or says_so or _only_calls_sage(override)


def _only_calls_sage(override: Any) -> bool:
    """Whether this is the override of KJNodes' sage patch and loaders, which do nothing but call the function that
    their `get_sage_func` has made around one of sageattention's. A version that does more has other names in it."""
    code = getattr(override, "__code__", None)
    if code is None or code.co_freevars != ("new_attention",) or not set(code.co_names) <= {"__wrapped__"}:
        return False
    attention = override.__closure__[0].cell_contents
    return getattr(attention, "__qualname__", "") == "get_sage_func.<locals>.attention_sage"


def attention_called_by(override: Any) -> str:
    """The name of the attention function of ComfyUI's that an override only calls: one that ComfyUI's node chose, or
    KJNodes' sage patch where sageattention chooses its kernel; "" for any other."""
    if f"{getattr(override, '__module__', '')}.{getattr(override, '__qualname__', '')}" == OF_COMFYUI:
        return str(getattr(override.__closure__[0].cell_contents, "__name__", ""))
    if not _only_calls_sage(override):
        return ""
    attention = inspect.unwrap(override.__closure__[0].cell_contents)
    cells = dict(zip(attention.__code__.co_freevars, attention.__closure__ or (), strict=True))
    code = getattr(inspect.unwrap(cells["sage_func"].cell_contents), "__code__", None) if "sage_func" in cells else None
    return "attention_sage" if code is not None and code.co_freevars == ("sageattn",) else ""


def goes_by_frames(patch: Any) -> bool:
    """Whether `patch` gives the same on a part of the tokens that is made of full frames."""
    return _is_one_of(OF_FRAMES, patch)


def _declared(function: Any) -> str | None:
    return getattr(getattr(function, "func", function), DECLARED, None)  # a partial has none of its own


def _is_one_of(names: Sequence[str], patch: Any) -> bool:
    named = _named(patch)
    path = named.__module__.replace(os.sep, ".")  # ComfyUI imports its extra nodes under the path of their file
    return any(f".{path}.{named.__qualname__}".endswith(f".{known}") for known in names)


def _named(patch: Any) -> Any:
    return patch if hasattr(patch, "__qualname__") else type(patch)
