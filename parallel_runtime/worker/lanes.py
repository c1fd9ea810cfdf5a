"""Work that needs no exchange inside the model: the branches of guidance and the rows of a batch, over groups of ranks.

Every lane holds all inputs, does its share, and ends with all results, so that whoever called need not know.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from .engine.exchange import any_of, gather
from .engine.mesh import Axis
from .engine.streams import chunk_range, chunk_sizes
from .ranks import refusing_together


class Lanes:
    """The ranks along one axis of the mesh that are not cut by sequence."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    @property
    def count(self) -> int:
        return self._axis.size

    def mine(self, total: int) -> range:
        """Which of `total` items this lane does: contiguous, by the lanes' shares, maybe none."""
        start, size = chunk_range(total, self._axis.parts, self._axis.index)
        return range(start, start + size)

    def refusing_together(self) -> AbstractContextManager[None]:
        """Around a lane's share: what one lane refuses all do, or they would wait in `collect` for what never comes."""
        return refusing_together(partial(any_of, self._axis))

    def collect(self, done: Tensor, total: int) -> Tensor:
        """[items of this lane, ...] of every lane to [total, ...], in order."""
        if self._axis.size == 1:
            return done
        (whole,) = gather(done, chunk_sizes(total, self._axis.parts), self._axis).wait()
        return whole


def from_the_first(axis: Axis, out: Any) -> Any:
    """A tensor, or several, as the first rank of `axis` has them: what comes after the tokens were put together each
    computes, and on devices of several kinds each to its own last digits."""
    if axis.size == 1 or not axis.world.unlike:
        return out

    def first(part: Tensor) -> Tensor:
        own = part if axis.index == 0 else part[:0]
        return gather(own, (len(part), *(0,) * (axis.size - 1)), axis).wait()[0]

    return tree_map_only(Tensor, first, out)


OF_ROWS = ("cond_or_uncond", "uuids")  # of transformer_options: one for each of the batches that were joined


def spread_rows(lanes: Lanes, evaluate: Callable[..., Any], batch: int, *args: Any, **kwargs: Any) -> Any:
    """`evaluate(*args, **kwargs)` with its rows spread over the lanes: tensors [batch, ...], also in lists and dicts.

    Its result is one such tensor, or a list of them. What ComfyUI's transformer_options hold is of the run as a whole,
    but for the noise level of each row and which prompt it belongs to.
    """
    if lanes.count == 1:
        return evaluate(*args, **kwargs)
    mine = lanes.mine(batch)
    rows = slice(mine.start, mine.stop) if mine else slice(0, 1)  # an idle lane learns the output's shape from row 0
    out = evaluate(*_cut(args, rows, batch), **_cut(kwargs, rows, batch))
    return tree_map_only(Tensor, lambda part: lanes.collect(part[: len(mine)], batch), out)


def row_by_row(evaluate: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`evaluate(x, *args, **kwargs)` one row after another, so that each is in another stage of a pipeline."""
    if x.shape[0] == 1:
        return evaluate(x, *args, **kwargs)
    parts = []
    for row in range(x.shape[0]):
        given, named = (_cut(value, slice(row, row + 1), x.shape[0]) for value in ((x, *args), kwargs))
        parts.append(evaluate(*given, **named))
    return tree_map(lambda *rows: torch.cat(rows), *parts)


def _cut(value: Any, rows: slice, batch: int) -> Any:
    """What is said of these rows of a batch."""
    if torch.is_tensor(value):
        return value[rows] if value.ndim and value.shape[0] == batch else value
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, rows, batch) for item in value)
    if type(value) is dict and "sample_sigmas" in value:
        return _options(value, rows, batch)
    return {name: _cut(item, rows, batch) for name, item in value.items()} if type(value) is dict else value


def _options(options: dict[str, Any], rows: slice, batch: int) -> dict[str, Any]:
    made = dict(options)
    if torch.is_tensor(options.get("sigmas")) and len(options["sigmas"]) == batch:
        made["sigmas"] = options["sigmas"][rows]
    for name in OF_ROWS:
        if of_batches := options.get(name):
            each = batch // len(of_batches)
            made[name] = [of_batches[row // each] for row in range(batch)[rows]]
    return made
