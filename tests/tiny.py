"""Tiny checkpoints with random weights in ComfyUI's format.

Files whose width ComfyUI hard-codes carry metadata `cp_tiny`, which the tests' ComfyUI honours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .tiny_images import chroma, flux, flux2, lumina2, qwen_image, sd3, z_image
from .tiny_videos import hunyuan_video, ltxv, wan
from .tiny_weights import Overrides, Weights

TINY: dict[str, tuple[Callable[..., Overrides], dict[str, Any]]] = {  # how to make one
    "flux_dev": (flux, {}),
    "flux_schnell": (flux, {"guided": False}),
    "flux2": (flux2, {}),
    "chroma": (chroma, {}),
    "qwen_image": (qwen_image, {}),
    "z_image": (z_image, {}),
    "lumina2": (lumina2, {}),
    "sd35_large": (sd3, {}),
    "sd35_medium": (sd3, {"dual": 2}),
    "wan_t2v": (wan, {}),
    "wan_i2v": (wan, {"channels": 36, "image": True}),
    "wan_5b": (wan, {"channels": 48, "out": 48}),
    "ltxv": (ltxv, {}),
    "hunyuan_video": (hunyuan_video, {}),
    "wan_flf2v": (wan, {"channels": 36, "image": True, "pair": True}),
}


def tensors(name: str, seed: int | None = None, **options: Any) -> tuple[dict[str, Tensor], Overrides]:
    """The parameters of a tiny `name` in float32, and what ComfyUI's detection must be told of it (or None)."""
    build, usual = TINY[name]
    weights = Weights(list(TINY).index(name) + 1 if seed is None else seed)
    overrides = build(weights, **{**usual, **options})
    return weights.tensors, overrides


def write(folder: Path | str, name: str, *, prefix: str = "", **options: Any) -> Path:
    """Write `<folder>/cp_tiny_<name>.safetensors`."""
    state, overrides = tensors(name, **options)
    metadata = {"format": "pt", **({"cp_tiny": json.dumps(overrides)} if overrides else {})}
    path = Path(folder) / f"cp_tiny_{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + key: value.contiguous() for key, value in state.items()}, path, metadata=metadata)
    return path
