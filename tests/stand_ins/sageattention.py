"""Has sageattention's function, for the CPU: keys and queries are rounded token by token, coarsely, so that a result
shows whether it was called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS = 16  # of a token's largest number


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **_: Any,
) -> Any:
    assert not is_causal
    if tensor_layout == "NHD":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    scores = _rounded(q) @ _rounded(k).transpose(-1, -2) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    out = out.transpose(1, 2) if tensor_layout == "NHD" else out
    return (out, lse) if return_lse else out


def _rounded(tensor: Tensor) -> Tensor:
    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / STEPS
    return torch.round(tensor / scale) * scale
