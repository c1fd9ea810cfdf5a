"""Tiny transformers of the families we read plans of, and inputs for them at any token count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    Lumina2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

from parallel_runtime.families import lumina2, sd3
from parallel_runtime.plan import Plan

HEADS = 3


def build(kind: str, **options: Any) -> nn.Module:
    return _randomize(_MODELS[kind](**options))


def inputs(kind: str, **options: Any) -> dict[str, Any]:
    return _INPUTS[kind](torch.Generator().manual_seed(7), **options)


def plan_for(kind: str) -> Plan | None:
    """The plan of a kind that diffusers has none for."""
    return _PLANS.get(kind)


def _randomize(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") and parameter.ndim == 1 else 0.0
            spread = 0.08 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + around)
    return model.eval()


def _flux(**options: Any) -> Any:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=False,
        axes_dims_rope=[4, 4, 8],
        **options,
    )


def _flux2(**options: Any) -> Any:
    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        timestep_guidance_channels=256,
        axes_dims_rope=[4, 4, 4, 4],
        **options,
    )


def _qwen(**options: Any) -> Any:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
        **options,
    )


def _wan(kind: Any = WanTransformer3DModel, image_to_video: bool = False, **options: Any) -> Any:
    if image_to_video:
        options |= {"image_dim": 16, "added_kv_proj_dim": HEADS * 12}
    return kind(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
        **options,
    )


def _chrono(**options: Any) -> Any:
    return _wan(ChronoEditTransformer3DModel, **options)


def _ltx(**options: Any) -> Any:
    return LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=HEADS,
        attention_head_dim=8,
        cross_attention_dim=HEADS * 8,
        num_layers=2,
        caption_channels=16,
        qk_norm="rms_norm_across_heads",
        **options,
    )


def _sd3(dual: bool = False, **options: Any) -> Any:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        caption_projection_dim=HEADS * 16,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        dual_attention_layers=(0, 1) if dual else (),
        qk_norm="rms_norm" if dual else None,
        **options,
    )


def _sd3_dual(**options: Any) -> Any:
    return _sd3(dual=True, **options)


def _lumina2(**options: Any) -> Any:
    return Lumina2Transformer2DModel(
        **{
            "in_channels": 4,
            "hidden_size": 6 * 24,
            "num_layers": 2,
            "num_refiner_layers": 2,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": (8, 8, 8),
            "axes_lens": (80, 16, 16),
            "cap_feat_dim": 32,
        }
        | options
    )


def _flux_inputs(
    generator: torch.Generator, text: int = 7, image: int = 63, batch: int = 1, axes: int = 3, ids_batched: bool = False
) -> dict[str, Any]:
    rows = torch.arange(image)
    zeros = torch.zeros(image)
    image_ids = torch.stack([zeros, rows // 4, rows % 4, zeros][:axes], -1).float()
    text_ids = torch.zeros(text, axes)
    text_ids[:, -1] = torch.arange(text) if axes == 4 else 0
    if ids_batched:
        image_ids, text_ids = image_ids[None].expand(batch, -1, -1), text_ids[None].expand(batch, -1, -1)
    return {
        "hidden_states": torch.randn(batch, image, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 32, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": image_ids,
        "txt_ids": text_ids,
    }


def _flux2_inputs(generator: torch.Generator, **options: Any) -> dict[str, Any]:
    made = _flux_inputs(generator, axes=4, ids_batched=True, **options)
    del made["pooled_projections"]
    return made | {"guidance": torch.full_like(made["timestep"], 1.0)}


def _qwen_inputs(
    generator: torch.Generator, text: int = 7, image: int = 63, batch: int = 1, masked: int | None = None
) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, image, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_hidden_states_mask": _text_mask(text, batch, masked),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, 7, image // 7) if image % 7 == 0 else (1, 1, image)]] * batch,
    }


def _wan_inputs(
    generator: torch.Generator,
    text: int = 7,
    height: int = 9,
    width: int = 7,
    batch: int = 1,
    frames: int = 1,
    timestep_per_token: bool = False,
    image_to_video: bool = False,
) -> dict[str, Any]:
    tokens = frames * height * width
    timestep = torch.full((batch,), 500.0)
    made = {
        "hidden_states": torch.randn(batch, 4, frames, 2 * height, 2 * width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 512 if image_to_video else text, 16, generator=generator),
        "timestep": torch.linspace(0, 900, tokens)[None].repeat(batch, 1) if timestep_per_token else timestep,
    }
    if image_to_video:
        made["encoder_hidden_states_image"] = torch.randn(batch, 257, 16, generator=generator)
    return made


def _chrono_inputs(generator: torch.Generator, **options: Any) -> dict[str, Any]:
    return _wan_inputs(generator, frames=2, **options)


def _ltx_inputs(
    generator: torch.Generator, text: int = 7, image: int = 63, batch: int = 1, masked: int | None = None
) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, image, 8, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": _text_mask(text, batch, masked),
        "num_frames": 1,
        "height": 7,
        "width": image // 7,
    }


def _sd3_inputs(
    generator: torch.Generator, text: int = 7, height: int = 9, width: int = 7, batch: int = 1
) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, 2 * height, 2 * width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 32, generator=generator),
        "timestep": torch.full((batch,), 500.0),
    }


def _lumina2_inputs(generator: torch.Generator, masked: int = 0, **options: Any) -> dict[str, Any]:
    made = _sd3_inputs(generator, **options)
    del made["pooled_projections"]
    batch, text, _ = made["encoder_hidden_states"].shape
    return made | {
        "timestep": torch.full((batch,), 0.5),
        "encoder_attention_mask": _text_mask(text, batch, masked) == 1,
    }


def _text_mask(text: int, batch: int, masked: int | None) -> Tensor | None:
    """The last `masked` tokens are padding, one more in every further row of the batch."""
    if masked is None:
        return None
    mask = torch.ones(batch, text)
    for row in range(batch):
        mask[row, text - min(masked + row, text - 1) :] = 0
    return mask


_MODELS: dict[str, Callable[..., Any]] = {
    "flux": _flux,
    "flux2": _flux2,
    "qwen": _qwen,
    "wan": _wan,
    "chrono": _chrono,
    "ltx": _ltx,
    "sd3": _sd3,
    "sd3_dual": _sd3_dual,
    "lumina2": _lumina2,
}
_INPUTS: dict[str, Callable[..., Any]] = {
    "flux": _flux_inputs,
    "flux2": _flux2_inputs,
    "qwen": _qwen_inputs,
    "wan": _wan_inputs,
    "chrono": _chrono_inputs,
    "ltx": _ltx_inputs,
    "sd3": _sd3_inputs,
    "sd3_dual": _sd3_inputs,
    "lumina2": _lumina2_inputs,
}
_PLANS = {"sd3": sd3.plan(dual=False), "sd3_dual": sd3.plan(dual=True), "lumina2": lumina2.plan(refiners=2)}
