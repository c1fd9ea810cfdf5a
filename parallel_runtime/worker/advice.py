"""A look at the attentions of a worker that has the whole sequence, and a word on what another kernel would gain there.

Changes nothing: such a worker keeps ComfyUI's own kernels and bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..specs import ModelSpec
from .engine.choosing import Sizes, advice, described
from .engine.mesh import Axis
from .engine.operators import heads_first
from .models import Model

WORTH_A_LOOK = 1024  # tokens

log = logging.getLogger(__name__)


class Watch:
    """The first of each model and shape, where this rank holds whole sequences and ComfyUI chooses kernels."""

    def __init__(self) -> None:
        self._seen: set[tuple[ModelSpec, torch.Size]] = set()

    def __call__(self, model: Model, x: Tensor) -> AbstractContextManager[Any]:
        """Around an evaluation on `x`."""
        seen = (model.spec, x.shape) in self._seen
        self._seen.add((model.spec, x.shape))
        if seen or x.device.type == "cpu" or model.cut_by_sequence or model.attention or model.compiled:
            return nullcontext()
        return Advising(model.mesh.context)


class Advising(TorchFunctionMode):
    """In here large attentions without a mask have a race, each size once. `alone` is this rank's own axis."""

    def __init__(self, alone: Axis) -> None:
        super().__init__()
        self._alone = alone

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and len(args) >= 3 and _plain(args[3:], kwargs):
            _look(self._alone, *args[:3])
        return func(*args, **kwargs)


def _plain(more: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Without a mask, dropout, causality and scales."""
    return not any(isinstance(value, Tensor) or value for value in (*more, *kwargs.values()))


def _look(alone: Axis, query: Tensor, key: Tensor, value: Tensor) -> None:
    """[B, heads, tokens, D] of each."""
    if min(query.shape[2], key.shape[2]) < WORTH_A_LOOK or query.shape[1] != key.shape[1]:
        return
    sizes = Sizes(
        batch=query.shape[0],
        queries=query.shape[2],
        keys=key.shape[2],
        heads=query.shape[1],
        head_dim=query.shape[3],
        dtype=query.dtype,
        what="alone",
    )
    faster = advice(query.transpose(1, 2), _own, sizes, alone)
    if faster and faster not in alone.world.advised:
        alone.world.advised.add(faster)
        log.warning(
            "[CP] attention of %s is faster with %s than with ComfyUI's own kernel, whose bits one worker keeps: set "
            "attention_backend to %s in CP Parallel Config to have it",
            described(sizes),
            faster,
            faster,
        )


def _own(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, __: float | None) -> Tensor:
    """As it was called: what ComfyUI set around it holds here too."""
    return scaled_dot_product_attention(*heads_first(q, k, v)).transpose(1, 2)
