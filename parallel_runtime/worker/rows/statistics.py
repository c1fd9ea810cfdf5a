"""GroupNorm with the statistics of all ranks, in float32 whatever the activations are in."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.exchange import gather
from .share import Share


def group_norm(
    share: Share,
    func: Callable[..., Tensor],
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.group_norm."""
    if x.ndim > 3:  # else rows and columns are one dim, in proportion to this rank's rows
        share.factor(x, "a group norm")
    batch, channels = x.shape[:2]
    mean, variance = _of_all(share, *_moments(x.reshape(batch, num_groups, -1)))
    spread = (batch, num_groups, channels // num_groups)
    mean, variance = (value.unsqueeze(2).expand(spread).reshape(-1) for value in (mean, variance))
    weight, bias = (None if value is None else value.to(mean.dtype).repeat(batch) for value in (weight, bias))
    rows = x.reshape(1, batch * channels, -1)
    # One fused kernel, which computes in float32: a batch norm whose channels are all items' channels.
    return F.batch_norm(rows, mean, variance, weight, bias, False, 0.0, eps).view(x.shape)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the last dim, without a copy of `x` in float32."""
    if x.dtype in (torch.float32, torch.float64):
        variance, mean = torch.var_mean(x, 2, correction=0)
        return mean, variance
    mean = x.sum(2, dtype=torch.float32) / x.shape[2]
    squares = torch.linalg.vector_norm(x, 2, 2, dtype=torch.float32).square() / x.shape[2]
    return mean, (squares - mean.square()).clamp_(min=0)


def _of_all(share: Share, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Chan's combination: the mean of the variances, and the variance of the means."""
    mine = torch.stack([mean, variance])[None]
    (everybodys,) = gather(mine, [1] * share.ranks.size, share.ranks).wait()
    means, variances = everybodys.unbind(1)
    weights = share.weights(mean.device).to(mean.dtype)
    mean = torch.tensordot(weights, means, 1)
    return mean, torch.tensordot(weights, variances + (means - mean).square(), 1)
