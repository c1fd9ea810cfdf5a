"""Text conditioning with padding. Knows no model."""

from __future__ import annotations

from torch import Tensor

from .base import rows


def without_padding(text: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Text [B, S, D] and mask [B or 1, S] without the columns at the end that no row uses.

    Exact: a masked key weighs nothing, and positions count from the front. Returns a bool mask, None where all is used.
    """
    if mask is None:
        return text, None
    if mask.is_floating_point():
        raise ValueError("a floating point attention_mask is a bias in ComfyUI; only masks of 0 and 1 are honoured")
    used = rows(mask.bool(), text.shape[0])
    length = int(used.any(dim=0).nonzero().max()) + 1 if used.any() else text.shape[1]
    used = used[:, :length]
    return text[:, :length], None if used.all() else used
