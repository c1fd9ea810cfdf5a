"""The rows (dim -2) or columns (dim -1) of every activation that each rank computes, and the neighbours' rows at its
edges, which travel while the inside is computed; the mode in which functions of torch go by them; and, for a UNet, the
rows of each of its levels, as pictures and as streams of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...architectures.row_plan import sides_to_cut
from ...architectures.split_plan import TEXT
from ...errors import Unsplittable
from ..comm.collectives import all_gather_v, allocate, send_recv
from ..comm.mesh import MeshDim
from ..split.streams import Streams, chunk_sizes

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
        """Returns each rank's share of all rows of `x`, which lie flat in 3 dims: float32, the weights of a mean."""
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
    # Every rank has the whole latent: its rows need not travel.
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


PICTURE_DIMS = 4  # of the least that has rows and columns


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels(Share):
    """Level l has ceil(rows / 2**l) rows of ceil(across / 2**l) pixels, where `rows` and `across` are the latent's and
    `depth` is the last level. `units` are each rank's rows of that one, and its rows of the others follow, here of
    11 rows with depth 2 and units 2 and 1 (only the last rank may have less than two rows for one):

        level 2    0         1       | 2
        level 1    0    1    2   3   | 4    5
        level 0    0 1  2 3  4 5 6 7 | 8 9  10

    The level of a tensor follows from its side that is not split, which is the same on all ranks. `source` is this
    rank's rows of a picture and the full picture, if every rank has it: neighbours' rows need not travel then."""

    rows: int
    across: int
    depth: int
    source: list[Tensor] = field(default_factory=list)

    @cached_property
    def sizes(self) -> tuple[Rows, ...]:
        """Returns the rows of each rank, by level."""
        return tuple(self._sizes(level) for level in range(self.depth + 1))

    def _sizes(self, level: int) -> Rows:
        total, step = -(-self.rows // 2**level), 2 ** (self.depth - level)
        ends = [min(units * step, total) for units in accumulate(self.units, initial=0)]
        return tuple(end - begin for begin, end in pairwise(ends))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Returns the size of the side that is not split, by level; no two are equal."""
        return tuple(-(-self.across // 2**level) for level in range(self.depth + 1))

    @cached_property
    def by_tokens(self) -> dict[int, int]:
        """Returns the level by this rank's tokens of it."""
        return {self.tokens(level)[self.index]: level for level in range(self.depth + 1)}

    def level(self, shape: Sequence[int], what: str, *, full: bool = False) -> int:
        """Returns the level of this rank's rows [..., H, W], or of a `full` picture. Raises NoLevel without one."""
        if (level := self._level(shape, full=full)) is None:
            raise NoLevel(f"{what} of {tuple(shape)} belongs to no level of {self.rows} x {self.across}")
        return level

    def _level(self, shape: Sequence[int], *, full: bool) -> int | None:
        if len(shape) < PICTURE_DIMS or shape[-3 - self.dim] not in self.widths:
            return None
        level = self.widths.index(shape[-3 - self.dim])
        rows = self.sizes[level]
        return level if shape[self.dim] == (sum(rows) if full else rows[self.index]) else None

    def is_level(self, x: Tensor) -> bool:
        return self._level(x.shape, full=False) is not None

    def is_full(self, x: Tensor) -> bool:
        """Returns whether `x` is the full picture of a level."""
        return self._level(x.shape, full=True) is not None

    def rows_of(self, x: Tensor, what: str) -> Rows:
        return self.sizes[self.level(x.shape, what)]

    def full_of(self, x: Tensor) -> Tensor | None:
        local, full = self.source or (None, None)
        return full if x is local else None

    def split(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of a picture of any level."""
        rows = self.sizes[self.level(x.shape, "a picture", full=True)]
        return x.narrow(self.dim, sum(rows[: self.index]), rows[self.index]).contiguous()

    def gather(self, x: Tensor) -> Tensor:
        return super().gather(x).contiguous()

    def full_plane(self, level: int) -> tuple[int, int]:
        """Returns the rows and columns of a level, of all ranks."""
        return self._plane(level, sum(self.sizes[level]))

    def full_shape(self, shape: list[int]) -> list[int]:
        """Returns the shape of the full picture of which this rank's rows have this one."""
        full = list(shape)
        full[self.dim] = sum(self.sizes[self.level(shape, "a shape")])
        return full

    def gather_tokens(self, x: Tensor, level: int) -> Tensor:
        """Gathers [B, local tokens, C] of a level to [B, all tokens, C], in the order of rows. Collective."""
        rows, at = self.sizes[level], 3 + self.dim
        local = x.unflatten(1, self._plane(level, rows[self.index])).movedim(at, 0)
        return all_gather_v(local, rows, self.ranks).wait()[0].movedim(0, at).flatten(1, 2)

    def gather_flat(self, x: Tensor) -> Tensor:
        """Gathers [B, local tokens, C] to [B, all tokens, C], rank by rank. Collective."""
        (full,) = all_gather_v(x.transpose(0, 1), self.tokens(self.by_tokens[x.shape[1]]), self.ranks).wait()
        return full.transpose(0, 1)

    def split_tokens(self, x: Tensor, level: int) -> Tensor:
        """Splits [B, all tokens, C] of a level to [B, local tokens, C]."""
        rows, at = self.sizes[level], 3 + self.dim
        plane = x.unflatten(1, self._plane(level, sum(rows)))
        return plane.narrow(at, sum(rows[: self.index]), rows[self.index]).flatten(1, 2)

    def tokens(self, level: int) -> Rows:
        """Returns the tokens of each rank at a level."""
        return tuple(rows * self.widths[level] for rows in self.sizes[level])

    def _plane(self, level: int, rows: int) -> tuple[int, int]:
        return (rows, self.widths[level]) if self.dim == -2 else (self.widths[level], rows)


class NoLevel(Unsplittable):
    """Refuses a tensor whose size is of no level, on all ranks alike."""


def levels_of(shape: torch.Size, depth: int, ranks: MeshDim, *, only_multiples: bool = False) -> Levels | None:
    """Returns the levels along the longer side of a latent [..., H, W], or else the other; None where neither has a row
    for each rank at the last level, or where two levels could not be told apart; `only_multiples` as in a RowPlan."""
    for dim, last in sides_to_cut(shape, depth, only_multiples=only_multiples):
        if last >= ranks.size:
            rows, across = shape[dim], shape[-3 - dim]
            return Levels(ranks=ranks, dim=dim, units=_units(rows, depth, ranks), rows=rows, across=across, depth=depth)
    return None


def _units(rows: int, depth: int, ranks: MeshDim) -> Rows:
    """Returns the rows of the last level: each rank ends next to its quota of `rows`, and has one at least."""
    last, ends = -(-rows // 2**depth), [0]
    for number, quota in enumerate(accumulate(chunk_sizes(rows, ranks.parts)), 1):
        end = round(quota / 2**depth) if number < ranks.size else last
        ends.append(min(max(end, ends[-1] + 1), last - (ranks.size - number)))
    return tuple(end - begin for begin, end in pairwise(ends))


class LevelTokens(Streams):
    """The pixels of each level as a stream of tokens: stream "0" is level 0. Tokens of the text are on every rank."""

    def __init__(self, ranks: MeshDim) -> None:
        super().__init__(ranks, frozenset(TEXT))
        self.levels: Levels | None = None

    def begin(self, levels: Levels | None) -> None:
        """Begins a forward of these levels; None ends it."""
        self.clear()
        self.levels = levels
        if levels is not None:
            for level in range(levels.depth + 1):
                self.record_length(str(level), sum(levels.tokens(level)), "a level of the latent")

    def sizes(self, stream: str) -> Rows:
        if stream in self.replicated:
            return super().sizes(stream)
        assert self.levels is not None
        return self.levels.tokens(int(stream))
