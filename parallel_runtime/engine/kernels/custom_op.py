"""Attention as one custom op, which torch.compile traces without a graph break and which runs eagerly inside.

Each attention function has an id here, since a custom op takes tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Takes query, key, value [B, tokens, heads, D], mask, scale, and numbers that it interprets itself; returns [B, query
# tokens, query heads, D of the values].
Attend = Callable[..., Tensor]

_TAGS = (torch.Tag.cudagraph_unsafe,)  # the host decides inside, and ranks wait for each other
_OP_IDS = count()
_REGISTERED: WeakValueDictionary[int, Attend] = WeakValueDictionary()


def register(attend: Attend) -> int:
    """Returns the id of an attention function, which is valid as long as the caller keeps the function."""
    op_id = next(_OP_IDS)
    _REGISTERED[op_id] = attend
    return op_id


@torch.library.custom_op("context_parallel::attend", mutates_args=(), tags=_TAGS)
def attend_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    op_id: int,
    extra: Sequence[int],
) -> Tensor:
    """Calls the attention function with this id; it is given the numbers `extra` too."""
    return _REGISTERED[op_id](query, key, value, mask, scale, *extra).contiguous()


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
