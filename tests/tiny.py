"""Tiny checkpoints with random weights in ComfyUI's format, and an input for each.

Files whose width ComfyUI hard-codes carry metadata `cp_tiny`, which the tests' ComfyUI honours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from .tiny_images import chroma, flux, flux2, lumina2, qwen_image, sd3, z_image
from .tiny_videos import hunyuan_video, ltxv, wan
from .tiny_weights import Overrides, Weights


class Tiny(NamedTuple):
    """How to make one, and an input for it: a latent's shape and what its conditioning holds."""

    build: Callable[..., Overrides]
    options: dict[str, Any]
    latent: tuple[int, ...]
    text: tuple[int, int]
    pooled: int = 0
    guidance: float | None = None
    clip_vision: bool = False
    mask: int = 0  # text tokens in use, 0 for no mask
    frame_rate: int = 0


IMAGE, VIDEO = (1, 16, 16, 24), (1, 16, 3, 8, 12)
TINY: dict[str, Tiny] = {
    "flux_dev": Tiny(flux, {}, IMAGE, (32, 128), pooled=64, guidance=3.5),
    "flux_schnell": Tiny(flux, {"guided": False}, IMAGE, (32, 128), pooled=64),
    "flux2": Tiny(flux2, {}, (1, 128, 8, 12), (24, 96), guidance=4.0),
    "chroma": Tiny(chroma, {}, IMAGE, (32, 96)),
    "qwen_image": Tiny(qwen_image, {}, (1, 16, 1, 16, 24), (20, 96)),
    "z_image": Tiny(z_image, {}, IMAGE, (20, 96)),
    "lumina2": Tiny(lumina2, {}, IMAGE, (20, 96)),
    "sd35_large": Tiny(sd3, {}, IMAGE, (30, 96), pooled=64),
    "sd35_medium": Tiny(sd3, {"dual": 2}, IMAGE, (30, 96), pooled=64),
    "wan_t2v": Tiny(wan, {}, VIDEO, (512, 4096)),
    "wan_i2v": Tiny(wan, {"channels": 36, "image": True}, VIDEO, (512, 4096), clip_vision=True),
    "wan_5b": Tiny(wan, {"channels": 48, "out": 48}, (1, 48, 3, 8, 12), (512, 4096)),
    "ltxv": Tiny(ltxv, {}, (1, 128, 3, 4, 6), (32, 4096), mask=20, frame_rate=25),
    "hunyuan_video": Tiny(hunyuan_video, {}, VIDEO, (24, 96), pooled=768, guidance=6.0),
    "wan_flf2v": Tiny(wan, {"channels": 36, "image": True, "pair": True}, VIDEO, (512, 4096), clip_vision=True),
}


def tensors(name: str, seed: int | None = None, **options: Any) -> tuple[dict[str, Tensor], Overrides]:
    """The parameters of a tiny `name` in float32, and what ComfyUI's detection must be told of it (or None)."""
    tiny = TINY[name]
    weights = Weights(list(TINY).index(name) + 1 if seed is None else seed)
    overrides = tiny.build(weights, **{**tiny.options, **options})
    return weights.tensors, overrides


def write(
    folder: Path | str,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    beside: dict[str, Tensor] | None = None,
    **options: Any,
) -> Path:
    """Write `<folder>/cp_tiny_<name>.safetensors`; `beside` are further tensors, as in a full checkpoint."""
    state, overrides = tensors(name, **options)
    metadata = {"format": "pt", **({"cp_tiny": json.dumps(overrides)} if overrides else {})}
    path = Path(folder) / f"cp_tiny_{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {prefix + key: value.to(dtype).contiguous() for key, value in state.items()}
    save_file({**named, **(beside or {})}, path, metadata=metadata)
    return path


def hints(name: str, **options: Any) -> dict[str, Any]:
    """What ComfyUI's unet_config would say of a tiny `name` beyond its shapes."""
    _, overrides = tensors(name, **options)
    return dict((overrides or {}).get("final", {}))
