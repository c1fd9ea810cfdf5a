"""The plain tensors inside a weight of any format, and the same weight around other ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def pieces(weight: Tensor) -> list[Tensor]:
    """A quantised weight's codes and scales; the bytes of one that only pretends to have another shape."""
    if hasattr(weight, "__tensor_flatten__"):
        names, _ = weight.__tensor_flatten__()
        return [getattr(weight, name) for name in names]
    return [weight.detach().as_subclass(Tensor)]


def around(weight: Tensor, parts: list[Tensor]) -> nn.Parameter:
    """A parameter of `weight`'s kind, shape and attributes that holds `parts`, as `pieces` gave them."""
    kind: Any = type(weight)
    if hasattr(weight, "__tensor_flatten__"):
        names, context = weight.__tensor_flatten__()
        made = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, weight.shape, None)
        made._is_param = True  # nn.Parameter would copy the scales
        return made
    if kind in (Tensor, nn.Parameter):
        return nn.Parameter(parts[0], requires_grad=False)
    made = parts[0].as_subclass(kind)
    made.__dict__.update({**vars(weight), "_is_param": True})
    return made


def hollow(piece: Tensor) -> Tensor:
    """What says the same of itself and has no memory."""
    return torch.zeros((), dtype=piece.dtype, device=piece.device).expand(piece.shape)
