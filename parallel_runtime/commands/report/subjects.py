"""ComfyUI's own networks with random weights: FLUX.1 and Wan 2.1 at their published widths, or tiny ones.

Runs where `comfy` can be imported.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..networks import randomized

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network by its class, "module:name" below comfy.ldm, and its configuration; the shapes of what it is given."""

    name: str
    path: str
    config: dict[str, Any]
    latent: Shape
    text: Shape
    pooled: int = 0

    def build(self, weights: torch.dtype, device: torch.device) -> nn.Module:
        """Builds the network as ComfyUI does, with layers that cast their weights as they compute."""
        import comfy.ops

        module, _, name = self.path.partition(":")
        kind = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
        torch.manual_seed(0)
        return randomized(kind(**self.config, dtype=weights, device=device, operations=comfy.ops.manual_cast))

    def inputs(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        shapes: dict[str, Shape] = {"x": self.latent, "context": self.text}
        shapes |= {"y": (1, self.pooled)} if self.pooled else {}
        made = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
        made |= {"guidance": torch.full((1,), 3.5, device=device, dtype=dtype)} if self.pooled else {}
        return made | {"timestep": torch.full((1,), 0.5, device=device, dtype=dtype)}


FLUX = Subject(
    name="FLUX, 1024 x 1024", path="flux.model:Flux", latent=(1, 16, 128, 128), text=(1, 512, 4096), pooled=768,
    config=dict(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
        mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10000,
        patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
    ),
)  # fmt: skip
WAN = Subject(
    name="Wan 14B, 10 of its 40 blocks, 832 x 480, 81 frames", path="wan.model:WanModel", latent=(1, 16, 21, 60, 104),
    text=(1, 512, 4096),
    config=dict(
        model_type="t2v", in_dim=16, dim=5120, ffn_dim=13824, freq_dim=256, text_dim=4096, out_dim=16, num_heads=40,
        num_layers=10,
    ),
)  # fmt: skip
ON_ONE_CARD = (  # what several ranks have room for there
    replace(
        FLUX, name="FLUX, 1024 x 1024, 9 of its 57 blocks", config=FLUX.config | dict(depth=3, depth_single_blocks=6)
    ),
    replace(
        WAN,
        name="Wan 14B, 3 of its 40 blocks, 832 x 480, 21 frames",
        config=WAN.config | dict(num_layers=3),
        latent=(1, 16, 6, 60, 104),
    ),
)
TINY = (
    replace(
        FLUX, name="FLUX, tiny", latent=(1, 16, 9, 14), text=(1, 7, 96), pooled=64,
        config=FLUX.config | dict(
            vec_in_dim=64, context_in_dim=96, hidden_size=192, num_heads=3, depth=2, depth_single_blocks=2,
            axes_dim=[16, 24, 24],
        ),
    ),
    replace(
        WAN, name="Wan, tiny", latent=(1, 16, 3, 6, 10), text=(1, 7, 96),
        config=WAN.config | dict(dim=192, ffn_dim=256, freq_dim=64, text_dim=96, num_heads=3, num_layers=2),
    ),
)  # fmt: skip


def subjects(*, tiny: bool, one_card: bool = False) -> tuple[Subject, ...]:
    return TINY if tiny else ON_ONE_CARD if one_card else (FLUX, WAN)
