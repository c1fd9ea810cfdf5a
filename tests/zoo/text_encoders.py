"""Tiny files of ComfyUI's own text encoders, which a loader with `OPTIONS` makes as small. In ComfyUI's python."""

from __future__ import annotations

from pathlib import Path

import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.text_encoders.qwen_image
import comfy.text_encoders.sa_t5
import comfy.text_encoders.sd3_clip
import comfy.text_encoders.z_image
import torch
from safetensors.torch import save_file

from .encoder_options import CLIP, OPTIONS
from .files import Weights, weights_of
from .tiny import normal

MAKERS = {
    "clip_l": lambda **with_: comfy.sd1_clip.SD1ClipModel(**with_).clip_l,
    "clip_g": lambda **with_: comfy.sdxl_clip.SDXLRefinerClipModel(**with_).clip_g,
    "t5base": lambda **with_: comfy.text_encoders.sa_t5.SAT5Model(**with_).t5base,
    "t5xxl": lambda **with_: comfy.text_encoders.sd3_clip.T5XXLModel(**with_),
    "qwen25_7b": lambda **with_: comfy.text_encoders.qwen_image.QwenImageTEModel(**with_).qwen25_7b,
    "qwen3_4b": lambda **with_: comfy.text_encoders.z_image.ZImageTEModel(**with_).qwen3_4b,
}
FP8 = torch.float8_e4m3fn
IN_FLOAT16 = ("clip_g", "qwen25_7b")  # as ComfyUI has text encoders; it casts the others


def write(models: Path) -> None:
    folder = models / "text_encoders"
    folder.mkdir(exist_ok=True)
    for name, make in MAKERS.items():
        encoder = make(
            dtype=torch.float32,
            model_options=OPTIONS | {f"{name}_model_config": OPTIONS.get(f"{name}_model_config", CLIP)},
        )
        with torch.no_grad():
            for weight in encoder.transformer.parameters():
                weight.copy_(normal(*weight.shape) * (0.1 if weight.ndim > 1 else 0.02) + (weight.ndim == 1))
        weights = weights_of(encoder.transformer)
        if name in IN_FLOAT16:
            weights = {key: value.half() for key, value in weights.items()}
        save_file(weights, folder / f"{name}.safetensors")
        if name == "t5xxl":
            save_file({key: value.to(FP8) for key, value in weights.items()}, folder / "t5xxl_fp8.safetensors")
            save_file(scaled(weights), folder / "t5xxl_scaled.safetensors")
    (models / "embeddings").mkdir(exist_ok=True)
    save_file({"clip_l": normal(2, CLIP["hidden_size"])}, models / "embeddings" / "fox.safetensors")


def scaled(weights: Weights) -> Weights:
    """The matrices of attention in fp8 with a scale each, as ComfyUI's first scaled files have them."""
    made: Weights = {"scaled_fp8": torch.zeros(0, dtype=FP8)}
    for key, value in weights.items():
        layer = key.removesuffix(".weight")
        if "SelfAttention" in layer and "bias" not in layer:
            made |= {f"{layer}.scale_weight": torch.tensor(0.01), key: (value / 0.01).to(FP8)}
        else:
            made[key] = value.half()
    return made
