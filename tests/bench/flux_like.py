"""A FLUX transformer at any width and depth, with random weights, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel


def build(double: int, single: int, heads: int, head_dim: int = 64) -> Any:
    torch.manual_seed(0)
    rope = [head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3]
    transformer: Any = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=512,
        pooled_projection_dim=256,
        guidance_embeds=False,
        axes_dims_rope=rope,
    )
    return transformer.eval()


def inputs(tokens: int, batch: int = 1) -> dict[str, Any]:
    """`tokens` of which one ninth are text, as 256 of 2304."""
    text = max(tokens // 9, 1)
    image = tokens - text
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(image)
    return {
        "hidden_states": torch.randn(batch, image, 64, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 512, generator=generator),
        "pooled_projections": torch.randn(batch, 256, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.stack([torch.zeros(image), rows // 64, rows % 64], -1).float(),
        "txt_ids": torch.zeros(text, 3),
    }
