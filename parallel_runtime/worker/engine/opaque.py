"""An attention as one operator to torch.compile: it breaks no graph, and inside runs as it would without.

Whoever attends has a number here, since an operator takes tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Query, key, value [B, tokens, heads, D], mask, scale; to [B, query tokens, query heads, D of the values].
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]

_NUMBERS = count()
_ATTENDING: WeakValueDictionary[int, Attend] = WeakValueDictionary()


def enlist(attend: Attend) -> int:
    """The number for `attend_opaquely`, as long as `attend` lives."""
    number = next(_NUMBERS)
    _ATTENDING[number] = attend
    return number


@torch.library.custom_op("context_parallel::attend", mutates_args=())
def attend_opaquely(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, number: int
) -> Tensor:
    """What the attention of this `number` makes of these."""
    return _ATTENDING[number](query, key, value, mask, scale).contiguous()


@attend_opaquely.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, number: int) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
