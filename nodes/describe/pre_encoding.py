"""Encodes the pictures and videos of model patches before a run: the workers have no VAE to do it during one.

The patch itself is called, with blocks that do nothing, so that its own code scales and encodes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import comfy.sd
import torch
from torch import Tensor, nn

from ...parallel_runtime.architectures import architecture_of
from .comfy_objects import Description, qualified_name

PAST_ALL_BLOCKS = 1 << 20
ENCODING_BLOCK = {  # the block before which a patch encodes its picture or video in the latent's size
    "comfy_extras.nodes_model_patch.DiffSynthCnetPatch": PAST_ALL_BLOCKS,
    "comfy_extras.nodes_model_patch.ZImageControlPatch": PAST_ALL_BLOCKS,
    "comfy_extras.nodes_model_patch.WanUni3CCnetPatch": 0,
}
RESULT_ATTRIBUTES = ("encoded_image", "prepared_render")  # patches keep the encoded result in these attributes
VIDEO_ATTRIBUTE = "render_video"  # the attribute with pixels, hundreds of megabytes
LatentSize = tuple[int, ...]


def latent_size(network: nn.Module, latent: Sequence[int]) -> LatentSize:
    """Returns a latent's [T,] H, W or L, padded as in the network, where patches see them."""
    sides, plan = tuple(latent[2:]), architecture_of(network)
    patch = plan.padded(network) if plan else 1
    return *sides[:-2], *(-(-side // patch) * patch for side in sides[-2:])


def pre_encode(options: dict[str, Any], size: LatentSize | None) -> dict[str, Any]:
    """Returns `options` (transformer_options) with patches whose pictures are encoded for a latent of this size, and
    that have no VAE. `size` None encodes nothing, for patches that will not run."""
    patches = options.get("patches") or {}
    encoded = {patch: _without_vae(patch, size) for of_kind in patches.values() for patch in of_kind if _encodes(patch)}
    if not encoded:
        return options
    return {
        **options,
        "patches": {
            kind: [encoded[patch] if _encodes(patch) else patch for patch in of_kind]
            for kind, of_kind in patches.items()
        },
    }


def _encodes(patch: Any) -> bool:
    return qualified_name(type(patch)) in ENCODING_BLOCK and isinstance(patch.vae, comfy.sd.VAE)


def _without_vae(patch: Any, size: LatentSize | None) -> Any:
    if size is not None:
        _encode(patch, size)
    made = copy.copy(patch)
    if hasattr(made, VIDEO_ATTRIBUTE):
        setattr(made, VIDEO_ATTRIBUTE, getattr(made, VIDEO_ATTRIBUTE)[:1])
    made.vae = Description({"kind": "encoded", "compression": patch.vae.spacial_compression_encode()})
    return made


def _encode(patch: Any, size: LatentSize) -> None:
    """Has the patch encode its pictures for a latent of this size and keep them, as in ComfyUI's own runs."""
    trial = copy.copy(patch)
    trial.model_patch = SimpleNamespace(model=_NoOpModel(patch.model_patch.model))
    nothing = torch.zeros(1, 1, 1)
    latent = torch.empty(1, 1, *size)
    block = ENCODING_BLOCK[qualified_name(type(patch))]
    trial({"x": latent, "img": nothing, "txt": nothing, "vec": nothing, "block_index": block})
    vars(patch).update({name: value for name, value in vars(trial).items() if name.startswith(RESULT_ATTRIBUTES)})


class _NoOpModel:
    """Replaces a patch's model, with blocks that compute nothing."""

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
