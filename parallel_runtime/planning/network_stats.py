"""A network in numbers, and what a run asks of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..architectures.partition import Load
from ..architectures.row_plan import RowLevel
from ..specs import Parallelism

LAYER_WEIGHTS = 12  # widths squared: the weights of a layer that a token passes. Modulation is of whole pictures.


@dataclass(frozen=True, kw_only=True)
class NetworkStats:
    """A network in numbers. `divisible`: a plan says how its sequence is cut; `skippable`: a step cache may leave its
    blocks out. `width` is heads x head size. `weights` is a count, `weight_bytes` the size in the file's format,
    `item_bytes` the size of one number in what it computes. `blocks` are the bytes of each block that a plan knows,
    `loads` what may be a stage's of a pipeline, in turn; `unpatched` says why its tokens cannot go through one patch
    by patch. `weight_bytes` counts its model patches and ControlNets, which every rank has whole; `residuals`
    are the tensors of all tokens that its ControlNets give, of which each rank has its part. `row_levels` are those of
    a network that is cut by rows, each with a quarter of the pixels of the one before."""

    name: str
    divisible: bool = True
    skippable: bool = True
    heads: int
    layers: int
    width: int
    weights: int
    weight_bytes: int
    item_bytes: int
    blocks: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()
    unpatched: str = ""
    residuals: int = 0
    row_levels: tuple[RowLevel, ...] = ()

    def undivided(self, name: str) -> NetworkStats:
        """The same network where nothing of it is cut or skipped."""
        return replace(
            self,
            name=name,
            divisible=False,
            skippable=False,
            heads=1,
            layers=0,
            width=0,
            blocks=(),
            loads=(),
            row_levels=(),
        )

    def work(self, rows: int, tokens: int, *, prompts: int = 1, cached: bool = False, recorded: bool = False) -> Work:
        """One evaluation of `rows` sequences of `tokens`, of each of so many `prompts`."""
        at_once = 1 if cached else prompts
        return Work(
            network=self, rows=rows, tokens=tokens, prompts=at_once, branches=prompts, cached=cached, recorded=recorded
        )

    def linear_flop(self, tokens: int) -> float:
        """FLOP of all products with weights, for one sequence."""
        if self.row_levels:
            return sum(2 * level.weights * tokens / 4**number for number, level in enumerate(self.row_levels))
        return 2 * self.token_weights * tokens

    def attention_flop(self, tokens: int) -> float:
        """FLOP of all attentions, for one sequence."""
        if self.row_levels:
            levels = enumerate(self.row_levels)
            return sum(4 * level.attentions * level.width * (tokens / 4**number) ** 2 for number, level in levels)
        return 4 * tokens**2 * self.width * self.layers

    def key_flop(self, tokens: int) -> float:
        """FLOP of the projections of all keys and values of a network that is cut by rows, for one sequence."""
        levels = enumerate(self.row_levels)
        return sum(4 * level.attentions * level.width**2 * tokens / 4**number for number, level in levels)

    @property
    def token_weights(self) -> int:
        """How many weights every token is multiplied by."""
        return min(self.weights, LAYER_WEIGHTS * self.layers * self.width**2) if self.layers else self.weights


@dataclass(frozen=True, kw_only=True)
class Work:
    """One evaluation: `tokens` of all streams together; `cached`: with a step cache; `recorded`: its launches are
    replayed. Workers evaluate `prompts` in one batch, of the `branches` of a step, unless cfg_degree shares them
    out. At most so many `row_ranks` can share a picture that is cut by rows."""

    network: NetworkStats
    tokens: int
    rows: int = 1
    prompts: int = 1
    branches: int = 1
    cached: bool = False
    recorded: bool = False
    row_ranks: int = 0

    @property
    def activation_bytes(self) -> int:
        """Size of one activation tensor of the whole sequence, of all rows."""
        return self.rows * self.row_bytes

    @property
    def attention_tensor_bytes(self) -> float:
        """Size of the queries of one attention, of all rows; the mean of all levels of a network that is cut by
        rows."""
        if not (levels := self.network.row_levels):
            return self.activation_bytes
        wide = sum(level.attentions * level.width * self.tokens / 4**number for number, level in enumerate(levels))
        return self.rows * wide * self.network.item_bytes / max(1, self.network.layers)

    @property
    def row_bytes(self) -> int:
        """Size of one activation tensor of one row: what a stage of a pipeline passes to the next."""
        return self.tokens * self.network.width * self.network.item_bytes

    def prompts_per_rank(self, degrees: Parallelism) -> int:
        """How many prompts a rank evaluates in one batch."""
        return -(-self.prompts // degrees.cfg_degree)

    def rows_of_group(self, degrees: Parallelism, group: int) -> int:
        """Rows of all prompts together that this one of the data_degree groups evaluates in a step."""
        shares = degrees.data_group_shares
        return -(-self.rows * shares[group] // sum(shares)) * self.prompts_per_rank(degrees)

    def busiest_rows(self, degrees: Parallelism) -> int:
        """The same of the group that has most; through stages of a pipeline they follow each other."""
        return max(self.rows_of_group(degrees, group) for group in range(degrees.data_degree))
