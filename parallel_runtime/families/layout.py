"""ComfyUI's latent layout to and from the transformers' packed token layout. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pad_to_patch(x: Tensor, patch: int) -> Tensor:
    """[..., H, W] with H and W rounded up to `patch`, wrapping around, as ComfyUI does. The caller crops the output."""
    missing_h, missing_w = -x.shape[-2] % patch, -x.shape[-1] % patch
    if not (missing_h or missing_w):
        return x
    flat = x.flatten(0, -4) if x.ndim > 3 else x
    return pad(flat, (0, missing_w, 0, missing_h), mode="circular").unflatten(0, x.shape[:-3])


def tokens_in(latent_shape: tuple[int, ...] | torch.Size, patch: int) -> int:
    """Tokens of a latent [B, C, H, W] or [B, C, T, H, W] cut into `patch` x `patch` squares, partial ones included."""
    frames = latent_shape[2] if len(latent_shape) == 5 else 1
    return frames * -(-latent_shape[-2] // patch) * -(-latent_shape[-1] // patch)


def patchify(x: Tensor, patch: int) -> Tensor:
    """[B, C, (T,) H, W] to tokens [B, (T) H/p W/p, C p p], channels outermost within a token."""
    x = x.unsqueeze(2) if x.ndim == 4 else x
    b, c, t, h, w = x.shape
    x = x.reshape(b, c, t, h // patch, patch, w // patch, patch)
    return x.permute(0, 2, 3, 5, 1, 4, 6).reshape(b, t * (h // patch) * (w // patch), c * patch * patch)


def unpatchify(tokens: Tensor, patch: int, height: int, width: int, frames: int | None = None) -> Tensor:
    """Undo `patchify` for a latent of `height` x `width`: [B, C, H, W], or [B, C, T, H, W] where `frames` is given."""
    b, _, c = tokens.shape
    t, h, w = frames or 1, height // patch, width // patch
    x = tokens.reshape(b, t, h, w, c // (patch * patch), patch, patch).permute(0, 4, 1, 2, 5, 3, 6)
    x = x.reshape(b, c // (patch * patch), t, height, width)
    return x if frames is not None else x.squeeze(2)


def grid(height: int, width: int, axes: int, device: torch.device) -> Tensor:
    """Position ids [height * width, axes], float32: the row on axis 1, the column on axis 2, zero elsewhere."""
    ids = torch.zeros(height, width, axes, device=device)
    ids[..., 1] = torch.arange(height, device=device)[:, None]
    ids[..., 2] = torch.arange(width, device=device)
    return ids.flatten(0, 1)
