"""Has flash_attn's function, for the CPU, which rounds as the stand-in of sageattention does."""

from __future__ import annotations

from typing import Any

from sageattention import sageattn
from torch import Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    out, lse = sageattn(q, k, v, "NHD", causal, softmax_scale, True)
    return (out, lse, None) if return_attn_probs else out
