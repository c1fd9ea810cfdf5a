"""The rows (dim -2) or columns (dim -1) of every activation that each rank computes, and the neighbours' rows at its
edges, which travel while the inside is computed; and the mode in which functions of torch go by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import Unsplittable
from ..comm.collectives import all_gather_v, allocate, send_recv
from ..comm.mesh import MeshDim

Rows = tuple[int, ...]  # of each rank
Handlers = dict[Any, Callable[..., Any]]  # by function: called with a Share, the function and its arguments
NeighbourRows = Callable[[], tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """Rank i of `ranks` has `units[i]` rows of the latent, and f times as many of a level that is f times as fine."""

    ranks: MeshDim
    dim: int
    units: tuple[int, ...]
    _weights: dict[tuple[Rows, torch.device], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.dim in (-2, -1)
        assert len(self.units) == self.ranks.size
        assert min(self.units) >= 1, "a rank without rows: use fewer ranks"

    @property
    def index(self) -> int:
        return self.ranks.index

    @property
    def local_units(self) -> int:
        return self.units[self.index]

    def is_level(self, x: Tensor) -> bool:
        """Returns whether `x` can be this rank's rows of some level."""
        return x.shape[self.dim] % self.local_units == 0

    def rows_of(self, x: Tensor, what: str) -> Rows:
        """Returns the rows of each rank at the level of `x`. Raises Refused where `x` cannot be this rank's rows."""
        factor, left = divmod(x.shape[self.dim], self.local_units)
        if left:
            raise Unsplittable(f"{what} of {tuple(x.shape)}: dim {self.dim} is no multiple of {self.local_units} rows")
        return tuple(units * factor for units in self.units)

    def full_of(self, x: Tensor) -> Tensor | None:
        """Returns the picture of which `x` is this rank's rows, if every rank has all of it."""
        return None

    def split(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of a full tensor of any level."""
        factor = x.shape[self.dim] // sum(self.units)
        return x.narrow(self.dim, sum(self.units[: self.index]) * factor, self.local_units * factor)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the full tensor of all ranks' rows. Collective."""
        (rows,) = all_gather_v(x.movedim(self.dim, 0), self.rows_of(x, "a gather"), self.ranks).wait()
        return rows.movedim(0, self.dim)

    def weights(self, x: Tensor) -> Tensor:
        """Returns each rank's weight in the mean over all rows of `x`, which lie flat in 3 dims: its share of the rows,
        float32."""
        key = rows, _ = (self.rows_of(x, "a group norm") if x.ndim > 3 else self.units), x.device
        if key not in self._weights:
            self._weights[key] = torch.tensor([each / sum(rows) for each in rows], device=x.device)
        return self._weights[key]


def fetch_neighbour_rows(share: Share, x: Tensor, before: int, after: int) -> NeighbourRows:
    """Starts to fetch `before` and `after` rows next to this rank's, no more than any rank has. The result waits for
    them, and is None at an outer edge and where none were asked for. Collective."""
    rows, ranks = x.shape[share.dim], range(share.ranks.size)
    send: dict[int, Tensor] = {}
    receive: dict[int, list[int]] = {}
    sides = ((share.index - 1, 0, after, before), (share.index + 1, rows - before, before, after))
    for peer, start, sent_rows, received_rows in sides:
        if peer in ranks and sent_rows:
            send[peer] = x.narrow(share.dim, start, sent_rows)
        if peer in ranks and received_rows:
            receive[peer] = list(x.shape)
            receive[peer][share.dim] = received_rows
    if not send and not receive:
        return lambda: (None, None)
    if (full := share.full_of(x)) is not None:
        first = sum(share.rows_of(x, "rows")[: share.index])
        ranges = {share.index - 1: (first - before, before), share.index + 1: (first + rows, after)}
        edges = {peer: full.narrow(share.dim, *ranges[peer]) for peer in receive}
        return lambda: (edges.get(share.index - 1), edges.get(share.index + 1))
    buffers = {peer: allocate(shape, x) for peer, shape in receive.items()}
    pending = send_recv(send, buffers, share.ranks)

    def wait() -> tuple[Tensor | None, Tensor | None]:
        by_peer = dict(zip(receive, pending.wait(), strict=True))
        return by_peer.get(share.index - 1), by_peer.get(share.index + 1)

    return wait


class RowFunctions(TorchFunctionMode):
    """Functions with one of `handlers` treat a tensor as this rank's rows of a larger one in this mode. `tick` is
    called before each of them: equally often, in the same places, on every rank."""

    def __init__(self, share: Share, handlers: Handlers, tick: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._share = share
        self._handlers = handlers
        self._tick = tick

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        self._tick()
        return handler(self._share, func, *args, **(kwargs or {}))
