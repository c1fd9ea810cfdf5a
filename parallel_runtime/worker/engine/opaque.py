"""An attention as one operator to torch.compile: it breaks no graph, and inside runs as it would without.

Whoever attends has a number here, since an operator takes tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Query, key, value [B, tokens, heads, D], mask, scale, and numbers that only it knows; to [B, query tokens, query
# heads, D of the values].
Attend = Callable[..., Tensor]

_TAGS = (torch.Tag.cudagraph_unsafe,)  # the host decides inside, and ranks wait for each other
_NUMBERS = count()
_ATTENDING: WeakValueDictionary[int, Attend] = WeakValueDictionary()


def enlist(attending: Attend) -> int:
    """The number for the operators, as long as `attending` lives."""
    number = next(_NUMBERS)
    _ATTENDING[number] = attending
    return number


@torch.library.custom_op("context_parallel::attend", mutates_args=(), tags=_TAGS)
def attend_opaquely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    number: int,
    more: Sequence[int],
) -> Tensor:
    """What the attention of this `number` makes of these, and of what `more` it asked for."""
    return _ATTENDING[number](query, key, value, mask, scale, *more).contiguous()


@attend_opaquely.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
