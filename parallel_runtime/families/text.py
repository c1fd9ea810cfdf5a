"""Text conditioning with padding. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .base import rows


def check_mask(cond: Mapping[str, Any]) -> None:
    """Raises ValueError for an attention_mask that `without_padding` cannot take."""
    text, mask = cond.get("c_crossattn"), cond.get("attention_mask")
    if mask is None or text is None:
        return
    if mask.is_floating_point():
        raise ValueError("its attention_mask is floating point, a bias to ComfyUI; only masks of 0 and 1 are honoured; "
                         "sample with KSampler")  # fmt: skip
    if mask.ndim != 2 or mask.shape[1] != text.shape[1]:
        raise ValueError(f"its attention_mask has the shape {tuple(mask.shape)}, for a text of {text.shape[1]} tokens; "
                         "use the text encoder that belongs to the model")  # fmt: skip


def without_padding(text: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Text [B, S, D] and mask [B or 1, S] without the columns at the end that no row uses.

    Exact: a masked key weighs nothing, and positions count from the front. Returns a bool mask, None where all is used.
    """
    if mask is None:
        return text, None
    used = rows(mask.bool(), text.shape[0])
    length = int(used.any(dim=0).nonzero().max()) + 1 if used.any() else text.shape[1]
    used = used[:, :length]
    return text[:, :length], None if used.all() else used
