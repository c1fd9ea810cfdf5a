"""Inputs of the tiny transformers, at any token count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
    generator: torch.Generator,
    text: int = 7,
    image: int = 63,
    batch: int = 1,
    masked: int | None = None,
    residuals: int = 0,
) -> dict[str, Any]:
    made = {
        "hidden_states": torch.randn(batch, image, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_hidden_states_mask": _text_mask(text, batch, masked),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, 7, image // 7) if image % 7 == 0 else (1, 1, image)]] * batch,
    }
    added = [torch.randn(batch, image, 48, generator=generator) for _ in range(residuals)]
    return made | ({"controlnet_block_samples": added} if residuals else {})


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
    generator: torch.Generator, text: int = 7, height: int = 9, width: int = 7, batch: int = 1, residuals: int = 0
) -> dict[str, Any]:
    made = {
        "hidden_states": torch.randn(batch, 4, 2 * height, 2 * width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 32, generator=generator),
        "timestep": torch.full((batch,), 500.0),
    }
    added = [torch.randn(batch, height * width, 48, generator=generator) for _ in range(residuals)]
    return made | ({"block_controlnet_hidden_states": added} if residuals else {})


def _lumina2_inputs(generator: torch.Generator, masked: int = 0, **options: Any) -> dict[str, Any]:
    made = _sd3_inputs(generator, **options)
    del made["pooled_projections"]
    batch, text, _ = made["encoder_hidden_states"].shape
    return made | {
        "timestep": torch.full((batch,), 0.5),
        "encoder_attention_mask": _text_mask(text, batch, masked) == 1,
    }


def _hunyuan15_inputs(
    generator: torch.Generator,
    text: int = 7,
    height: int = 9,
    width: int = 7,
    batch: int = 1,
    masked: int = 2,
    pictured: bool = False,
) -> dict[str, Any]:
    pictures = torch.randn(batch, 3, 8, generator=generator)
    return {
        "hidden_states": torch.randn(batch, 4, 1, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_attention_mask": _text_mask(text, batch, masked),
        "encoder_hidden_states_2": torch.randn(batch, 2, 12, generator=generator),
        "encoder_attention_mask_2": _text_mask(2, batch, 1),
        "image_embeds": pictures if pictured else torch.zeros_like(pictures),
        "timestep": torch.full((batch,), 500.0),
    }


def _ltx2_inputs(
    generator: torch.Generator,
    text: int = 7,
    video: int = 63,
    audio: int = 11,
    batch: int = 1,
    masked: int | None = None,
    timestep_per_token: bool = False,
    perturbed: bool = False,
    **options: Any,
) -> dict[str, Any]:
    timesteps = {"timestep": torch.full((batch,), 500.0), "audio_timestep": torch.full((batch,), 400.0)}
    if timestep_per_token:
        tokens = {"timestep": video, "audio_timestep": audio}
        timesteps = {name: torch.linspace(0, 900, count).repeat(batch, 1) for name, count in tokens.items()}
    return {
        "hidden_states": torch.randn(batch, video, 8, generator=generator),
        "audio_hidden_states": torch.randn(batch, audio, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "audio_encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_attention_mask": _text_mask(text, batch, masked),
        "audio_encoder_attention_mask": _text_mask(text, batch, masked),
        **timesteps,
        "sigma": torch.full((batch,), 500.0),
        "num_frames": video // 7 if video % 7 == 0 else video,
        "height": 7 if video % 7 == 0 else 1,
        "width": 1,
        "audio_num_frames": audio,
        "perturbation_mask": (torch.arange(batch) % 2).float() if perturbed else None,
        **options,
    }


def _text_mask(text: int, batch: int, masked: int | None) -> Tensor | None:
    """The last `masked` tokens are padding, one more in every further row of the batch."""
    if masked is None:
        return None
    mask = torch.ones(batch, text)
    for row in range(batch):
        mask[row, text - min(masked + row, text - 1) :] = 0
    return mask


INPUTS: dict[str, Callable[..., Any]] = {
    "flux": _flux_inputs,
    "flux2": _flux2_inputs,
    "qwen": _qwen_inputs,
    "wan": _wan_inputs,
    "chrono": _chrono_inputs,
    "ltx": _ltx_inputs,
    "sd3": _sd3_inputs,
    "sd3_dual": _sd3_inputs,
    "lumina2": _lumina2_inputs,
    "hunyuan15": _hunyuan15_inputs,
    "ltx2": _ltx2_inputs,
    "ltx23": _ltx2_inputs,
}
