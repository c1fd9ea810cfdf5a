"""The neighbours' rows, which travel while the inside is computed."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..engine.exchange import trade
from .share import Share

Answer = Callable[[], tuple[Tensor | None, Tensor | None]]


def ask(share: Share, x: Tensor, before: int, after: int) -> Answer:
    """Start to fetch so many rows before and after this rank's. The answer waits for them: None at an outer edge, and
    where none were asked for. Collective."""
    factor = share.factor(x, "padding")
    if min(share.units) * factor < max(before, after):
        return _from_afar(share, x, before, after)
    rows, last = x.shape[share.dim], share.ranks.size - 1
    give, take, shape = {}, {}, list(x.shape)
    if share.index > 0:
        if after:
            give[share.index - 1] = x.narrow(share.dim, 0, after)
        if before:
            take[share.index - 1] = [*shape]
            take[share.index - 1][share.dim] = before
    if share.index < last:
        if before:
            give[share.index + 1] = x.narrow(share.dim, rows - before, before)
        if after:
            take[share.index + 1] = [*shape]
            take[share.index + 1][share.dim] = after
    if not give and not take:
        return lambda: (None, None)
    pending = trade(give, take, share.ranks, like=x)

    def answer() -> tuple[Tensor | None, Tensor | None]:
        got = dict(zip(take, pending.wait(), strict=True))
        return got.get(share.index - 1), got.get(share.index + 1)

    return answer


def _from_afar(share: Share, x: Tensor, before: int, after: int) -> Answer:
    """From further than the next rank: rare, and small, since some rank has fewer rows than a convolution is wide.
    Beyond the outer edges are zeros."""
    whole, rows = share.whole(x), x.shape[share.dim]
    around = [0, 0] * -share.dim
    around[-2:] = before, after
    start = share.before * (rows // share.own)
    wide = F.pad(whole, around)
    top, _, bottom = wide.narrow(share.dim, start, before + rows + after).split([before, rows, after], share.dim)
    first, last = share.index == 0, share.index == share.ranks.size - 1
    return lambda: (None if first or not before else top, None if last or not after else bottom)
