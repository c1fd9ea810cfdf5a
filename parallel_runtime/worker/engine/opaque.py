"""An attention as one operator to torch.compile: it breaks no graph, and inside runs as it would without.

Whoever attends has a number here, since an operator takes tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Query, key, value [B, tokens, heads, D], mask, scale; to [B, query tokens, query heads, D of the values].
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]

_TAGS = (torch.Tag.cudagraph_unsafe,)  # the host decides inside, and ranks wait for each other
_NUMBERS = count()
_ATTENDING: WeakValueDictionary[int, Any] = WeakValueDictionary()


def enlist(attending: object) -> int:
    """The number for the operators, as long as `attending` lives."""
    number = next(_NUMBERS)
    _ATTENDING[number] = attending
    return number


@torch.library.custom_op("context_parallel::attend", mutates_args=(), tags=_TAGS)
def attend_opaquely(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, number: int
) -> Tensor:
    """What the attention of this `number` makes of these."""
    attend: Attend = _ATTENDING[number]
    return attend(query, key, value, mask, scale).contiguous()


@attend_opaquely.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, number: int) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


@torch.library.custom_op("context_parallel::answer", mutates_args=(), tags=_TAGS)
def answer_opaquely(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scope: int, settings: int, number: int
) -> Tensor:
    """What the override of this `number` answers."""
    out: Tensor = _ATTENDING[number].answer(query, key, value, mask, scope, settings)
    return out.contiguous()


@answer_opaquely.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scope: int, settings: int, number: int) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
