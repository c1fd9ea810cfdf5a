"""Pictures and videos that a model patch would have a VAE encode in the middle of a run, encoded before it: workers
have no VAE.

The patch is asked itself, by a call in which its blocks do nothing, so that its own code scales and encodes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import comfy.sd
import torch
from torch import Tensor, nn

from ..parallel_runtime.networks import network_of
from .code import Words, title

PAST = 1 << 20  # a block that no network has
ENCODING = {  # a picture or video of the latent's size where what they have encoded is of another: at which block
    "comfy_extras.nodes_model_patch.DiffSynthCnetPatch": PAST,
    "comfy_extras.nodes_model_patch.ZImageControlPatch": PAST,
    "comfy_extras.nodes_model_patch.WanUni3CCnetPatch": 0,
}
ENCODED = ("encoded_image", "prepared_render")  # as which they keep it
VIDEO = "render_video"  # of pixels, hundreds of megabytes
Side = tuple[int, ...]


def side_of(network: nn.Module, latent: Sequence[int]) -> Side:
    """The sides of a latent, [T,] H, W or L, as the network shows them to patches between its blocks."""
    sides, plan = tuple(latent[2:]), network_of(network)
    patch = plan.padded(network) if plan else 1
    return *sides[:-2], *(-(-side // patch) * patch for side in sides[-2:])


def encoded_ahead(options: dict[str, Any], side: Side | None) -> dict[str, Any]:
    """transformer_options whose patches have their pictures encoded for a latent of this side, and no VAE; None where
    nobody will run them."""
    patches = options.get("patches") or {}
    settled = {patch: _without_vae(patch, side) for found in patches.values() for patch in found if _encodes(patch)}
    if not settled:
        return options
    return {
        **options,
        "patches": {
            kind: [settled[patch] if _encodes(patch) else patch for patch in found] for kind, found in patches.items()
        },
    }


def _encodes(patch: Any) -> bool:
    return title(type(patch)) in ENCODING and isinstance(patch.vae, comfy.sd.VAE)


def _without_vae(patch: Any, side: Side | None) -> Any:
    if side is not None:
        _encode(patch, side)
    settled = copy.copy(patch)
    if hasattr(settled, VIDEO):
        setattr(settled, VIDEO, getattr(settled, VIDEO)[:1])
    settled.vae = Words({"kind": "encoded", "compression": patch.vae.spacial_compression_encode()})
    return settled


def _encode(patch: Any, side: Side) -> None:
    """It keeps its pictures encoded for a latent of this size, as it does in ComfyUI's own runs."""
    trial = copy.copy(patch)
    trial.model_patch = SimpleNamespace(model=_Idle(patch.model_patch.model))
    nothing = torch.zeros(1, 1, 1)
    latent = torch.empty(1, 1, *side)
    trial({"x": latent, "img": nothing, "txt": nothing, "vec": nothing, "block_index": ENCODING[title(type(patch))]})
    vars(patch).update({name: value for name, value in vars(trial).items() if name.startswith(ENCODED)})


class _Idle:
    """A patch's model without its blocks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def control_block(self, *_: Any) -> Tensor:
        return torch.zeros(1, 1, 1)

    def process_input(self, *_: Any) -> tuple[None, None]:
        return None, None

    def forward_block(self, *_: Any) -> tuple[None, Tensor]:
        return None, torch.zeros(1, 1, 1)
