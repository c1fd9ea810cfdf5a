"""What differs between models. A new model is one file here and one line in FAMILIES.

Imports torch, never diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Refused
from .base import Family, Shapes
from .chroma import Chroma
from .flux import Flux
from .flux2 import Flux2
from .hunyuan_video import HunyuanVideo
from .ltxv import LTXV
from .lumina2 import Lumina2
from .qwen_image import QwenImage
from .sd3 import SD3
from .wan import Wan
from .z_image import ZImage

__all__ = ["FAMILIES", "Family", "Shapes", "recognise"]

FAMILIES: tuple[type[Family], ...] = (
    Chroma, Flux, Flux2, HunyuanVideo, Lumina2, LTXV, QwenImage, SD3, Wan, ZImage,
)  # fmt: skip


def recognise(shapes: Shapes, hints: Mapping[str, Any] | None = None) -> Family:
    """The family of a checkpoint, configured for it.

    `shapes` as in `header.Header.shapes`, `hints` as ComfyUI's unet_config. Raises Refused naming what was found
    when no family knows these parameters.
    """
    for family in FAMILIES:
        if family.matches(shapes):
            return family(shapes, hints or {})
    names = ", ".join(family.name for family in FAMILIES)
    found = ", ".join(sorted(shapes)[:3]) or "no parameters at all"
    raise Refused(f"no family knows this checkpoint (it has {found}); take a model of one of these: {names}")
