"""Padding along the cut means the neighbour's rows; at the outer edges it means what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...errors import Refused
from .halo import ask
from .share import Share


def pad(
    share: Share,
    func: Callable[..., Tensor],
    x: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    """torch.nn.functional.pad."""
    at = 2 * (-1 - share.dim)
    before, after = (pad[at], pad[at + 1]) if len(pad) > at + 1 else (0, 0)
    if before == after == 0:
        return func(x, pad, mode, value)
    if min(before, after) < 0 or mode == "circular":
        raise Refused(f"padding {tuple(pad)} ({mode}) of {tuple(x.shape)} along the cut")
    factor = share.factor(x, "padding")
    fewest = min(share.units) * factor
    if max(before, after) + (mode == "reflect") > fewest:  # some of it is further than the next rank
        y = func(share.whole(x), pad, mode, value)
        rows = share.own * factor + before + after
        return y.narrow(share.dim, share.before * factor, rows).contiguous()
    answer = ask(share, x, before, after)
    across = [*pad]
    across[at] = across[at + 1] = 0
    y = func(x, pad, mode, value)
    top, bottom = answer()
    if top is not None:
        y.narrow(share.dim, 0, before).copy_(func(top, across, mode, value))
    if bottom is not None:
        y.narrow(share.dim, y.shape[share.dim] - after, after).copy_(func(bottom, across, mode, value))
    return y
