"""Tiny transformers of the classes that we have plans of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    Lumina2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import nn

from . import tiny_others
from .tiny_inputs import INPUTS

HEADS = 3


def build(kind: str, **options: Any) -> nn.Module:
    return _randomize(_MODELS[kind](**options))


def inputs(kind: str, **options: Any) -> dict[str, Any]:
    return (INPUTS | tiny_others.INPUTS)[kind](torch.Generator().manual_seed(7), **options)


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


def _hunyuan15(**options: Any) -> Any:
    return HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=8,
        rope_axes_dim=(4, 4, 8),
        **options,
    )


def _ltx2(**options: Any) -> Any:
    return LTX2VideoTransformer3DModel(
        **{
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": HEADS,
            "attention_head_dim": 8,
            "cross_attention_dim": HEADS * 8,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": HEADS,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": HEADS * 4,
            "num_layers": 2,
            "caption_channels": 16,
        }
        | options
    )


def _ltx23(**options: Any) -> Any:
    """Gates, prompt modulation, perturbed attention, split rope: what LTX-2.3 adds."""
    added = dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True)
    return _ltx2(perturbed_attn=True, rope_type="split", **added, **options)


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
    "hunyuan15": _hunyuan15,
    "ltx2": _ltx2,
    "ltx23": _ltx23,
    **tiny_others.MODELS,
}
