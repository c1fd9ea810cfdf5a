"""ComfyUI's own patches inside blocks that see each token by itself, divided and not, in ComfyUI's python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ..zoo.remade import lllite as tiny_lllite
from .between_cases import mixing
from .cases import divided_forward, error, forward, made

BOTH_PROMPTS = {"cond_or_uncond": [0, 1]}


class Collecting:
    """A MODEL, as far as a node puts patches on it."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Any]] = {}

    def clone(self) -> Collecting:
        return self

    def set_model_patch(self, patch: Any, kind: str) -> None:
        self.patches.setdefault(kind, []).append(patch)

    def set_model_attn1_output_patch(self, patch: Any) -> None:
        self.set_model_patch(patch, "attn1_output_patch")

    def disable_model_cfg1_optimization(self) -> None:
        """Is of sampling."""


def guided(rank: int, world: int, name: str, ring: int, ulysses: int, between: bool) -> float:
    """Normalized Attention Guidance; `between`: beside a patch for which tokens are whole between blocks."""
    from comfy_extras.nodes_nag import NAGuidance

    model = Collecting()
    NAGuidance.execute(model, nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5)
    if between:
        model.set_model_patch(mixing, "double_block")
    return parity(name, ring, ulysses, model.patches)


def controlled(rank: int, world: int, ring: int, ulysses: int) -> float:
    """Anima LLLite, on queries, keys and values of all blocks and on the first one's MLP."""
    from comfy.ldm.anima import lllite

    image = torch.rand(1, 136, 184, 3, generator=torch.Generator().manual_seed(3))
    patch = lllite.AnimaLLLitePatch(SimpleNamespace(model=tiny_lllite(192)), image, None, 0.9, 1e9, -1.0)
    targets = {"q": "self_attn_q_proj", "k": "self_attn_k_proj", "v": "self_attn_v_proj"}
    patches = {
        "post_input": [patch],
        "attn1_patch": [lllite.AnimaLLLiteAttentionPatch(patch, targets)],
        "attn2_patch": [lllite.AnimaLLLiteAttentionPatch(patch, {"q": "cross_attn_q_proj"})],
        "mlp_patch": [lllite.AnimaLLLiteMLPPatch(patch)],
    }
    return parity("anima", ring, ulysses, patches)


def parity(name: str, ring: int, ulysses: int, patches: dict[str, list[Any]]) -> float:
    network, inputs = made(name)
    options = {"patches": patches, **BOTH_PROMPTS}
    wants = forward(network, inputs, **options)
    assert error(wants, forward(network, inputs)) > 1e-3, "the patch changes nothing"
    return error(divided_forward(network, inputs, ring, ulysses, **options), wants)


torch.set_grad_enabled(False)
