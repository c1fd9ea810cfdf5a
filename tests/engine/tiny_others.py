"""More tiny transformers and their inputs: those of which diffusers has no plan, or one that is no use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    HeliosTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    MiniMaxH3Transformer3DModel,
    ZImageTransformer2DModel,
)

HEADS = 3


def _chroma(**options: Any) -> Any:
    return ChromaTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=HEADS,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1, **options,
    )  # fmt: skip


def _helios(**options: Any) -> Any:
    return HeliosTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, ffn_dim=32,
        num_layers=2, rope_dim=(4, 4, 4), **options,
    )  # fmt: skip


def _hunyuan(**options: Any) -> Any:
    return HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=16, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=16, pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 8), **options,
    )  # fmt: skip


def _minimax_h3(**options: Any) -> Any:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=16, hidden_size=40, num_layers=2, num_refiner_layers=1,
        ffn_dim=32, in_channels=4, audio_in_channels=6, text_dim=16, freq_dim=32, time_embed_hidden_dim=24,
        time_embed_dim=24, rope_freq_dim=2, **options,
    )  # fmt: skip


def _z_image(**options: Any) -> Any:
    return ZImageTransformer2DModel(
        in_channels=4, dim=HEADS * 16, n_layers=2, n_refiner_layers=2, n_heads=HEADS, n_kv_heads=HEADS, cap_feat_dim=16,
        axes_dims=[4, 4, 8], axes_lens=[256, 64, 64], **options,
    )  # fmt: skip


def _chroma_inputs(
    generator: torch.Generator, text: int = 7, image: int = 63, batch: int = 1, masked: int | None = None
) -> dict[str, Any]:
    rows = torch.arange(image)
    mask = torch.ones(batch, text + image, dtype=torch.bool)
    mask[:, text - (masked or 0) : text] = False
    return {
        "hidden_states": torch.randn(batch, image, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 32, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.stack([torch.zeros(image), rows // 4, rows % 4], -1).float(),
        "txt_ids": torch.zeros(text, 3),
        "attention_mask": None if masked is None else mask,
    }


def _helios_inputs(
    generator: torch.Generator, height: int = 3, width: int = 5, batch: int = 1, history: bool = False
) -> dict[str, Any]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made: dict[str, Any] = {
        "hidden_states": normal(batch, 4, 2, 2 * height, 2 * width),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": normal(batch, 7, 16),
    }
    if history:
        indices = {"short": 2, "mid": 2, "long": 4}
        start = 0
        for name in ("long", "mid", "short"):
            made[f"indices_latents_history_{name}"] = torch.arange(start, start + indices[name]).expand(batch, -1)
            made[f"latents_history_{name}"] = normal(batch, 4, indices[name], 2 * height, 2 * width)
            start += indices[name]
        made["indices_hidden_states"] = torch.arange(start, start + 2).expand(batch, -1)
    return made


def _hunyuan_inputs(
    generator: torch.Generator, text: int = 7, height: int = 3, width: int = 7, batch: int = 1, masked: int = 2
) -> dict[str, Any]:
    mask = torch.ones(batch, text, dtype=torch.long)
    mask[:, text - masked :] = 0
    return {
        "hidden_states": torch.randn(batch, 4, 3, 2 * height, 2 * width, generator=generator),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "guidance": torch.full((batch,), 6000.0),
    }


def _minimax_h3_inputs(
    generator: torch.Generator, text: int = 5, video: int = 31, audio: int = 9, batch: int = 1
) -> dict[str, Any]:
    rows = torch.arange(text + video + audio)
    tags = torch.tensor([1] * text + [0] * video + [2] * audio)
    return {
        "hidden_states": torch.randn(batch, video, 16, generator=generator),
        "audio_hidden_states": torch.randn(batch, audio, 6, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "timestep": torch.tensor([0.0, 0.4, 0.7]),
        "timestep_indices": rows % 3,
        "token_tags": tags,
        "position_ids": torch.stack([rows, rows % 5, rows % 7], -1).float(),
        "video_indices": (tags == 0).nonzero()[:, 0],
        "audio_indices": (tags == 2).nonzero()[:, 0],
        "text_indices": (tags == 1).nonzero()[:, 0],
    }


def _z_image_inputs(
    generator: torch.Generator, text: int = 7, height: int = 7, width: int = 5, batch: int = 1, residuals: int = 0
) -> dict[str, Any]:
    """The rows of a batch differ in size. Its `residuals` are one of so many tokens, all of image and text."""
    added = {1: torch.randn(batch, residuals, HEADS * 16, generator=generator)}
    return ({"controlnet_block_samples": added} if residuals else {}) | {
        "x": [torch.randn(4, 1, 2 * (height + row), 2 * width, generator=generator) for row in range(batch)],
        "t": torch.full((batch,), 0.5),
        "cap_feats": [torch.randn(text + 3 * row, 16, generator=generator) for row in range(batch)],
    }


MODELS: dict[str, Callable[..., Any]] = {
    "chroma": _chroma,
    "helios": _helios,
    "hunyuan": _hunyuan,
    "minimax_h3": _minimax_h3,
    "z_image": _z_image,
}
INPUTS: dict[str, Callable[..., dict[str, Any]]] = {
    "chroma": _chroma_inputs,
    "helios": _helios_inputs,
    "hunyuan": _hunyuan_inputs,
    "minimax_h3": _minimax_h3_inputs,
    "z_image": _z_image_inputs,
}
