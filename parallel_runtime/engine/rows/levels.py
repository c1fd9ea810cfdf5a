"""A UNet that is split by rows: the rows of each of its levels, as pictures and as streams of tokens, and ComfyUI's
patches inside of it, which see full tensors and full shapes, and whose outputs are split. The attention between two
patches of a block is computed in full on every rank.

Knows the kinds of patches by ComfyUI's names, and no single patch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...architectures.block_patches import sees_each_token
from ...architectures.row_plan import sides_to_cut
from ...architectures.split_plan import TEXT
from ...errors import Unsplittable
from ..comm.collectives import all_gather_v
from ..comm.mesh import MeshDim
from ..split.streams import Streams, chunk_sizes
from .functions import Rows, Share


class NoLevel(Unsplittable):
    """Refuses a tensor whose size is of no level, on all ranks alike."""


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
        by_level = []
        for level in range(self.depth + 1):
            total, step = -(-self.rows // 2**level), 2 ** (self.depth - level)
            ends = [min(units * step, total) for units in accumulate(self.units, initial=0)]
            by_level.append(tuple(end - begin for begin, end in pairwise(ends)))
        return tuple(by_level)

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
            raise self.no_level(what, shape)
        return level

    def no_level(self, what: str, shape: Sequence[int]) -> NoLevel:
        return NoLevel(f"{what} of {tuple(shape)} belongs to no level of {self.rows} x {self.across}")

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

    def full_shape(self, shape: list[int]) -> list[int]:
        """Returns the shape of the full picture of which this rank's rows have this one."""
        full = list(shape)
        full[self.dim] = sum(self.sizes[self.level(shape, "a shape")])
        return full

    def gather_tokens(self, x: Tensor, level: int) -> Tensor:
        """Gathers [B, local tokens, C] of a level to [B, all tokens, C], in the order of rows. Collective."""
        rows, at = self.sizes[level], 3 + self.dim
        local = x.unflatten(1, self.plane(level, rows[self.index]))
        return all_gather_v(local, rows, self.ranks, at).flatten(1, 2)

    def gather_flat(self, x: Tensor) -> Tensor:
        """Gathers [B, local tokens, C] to [B, all tokens, C], rank by rank. Collective."""
        return all_gather_v(x, self.tokens(self.by_tokens[x.shape[1]]), self.ranks, 1)

    def split_tokens(self, x: Tensor, level: int) -> Tensor:
        """Splits [B, all tokens, C] of a level to [B, local tokens, C]."""
        rows, at = self.sizes[level], 3 + self.dim
        plane = x.unflatten(1, self.plane(level, sum(rows)))
        return plane.narrow(at, sum(rows[: self.index]), rows[self.index]).flatten(1, 2)

    def tokens(self, level: int) -> Rows:
        """Returns the tokens of each rank at a level."""
        return tuple(rows * self.widths[level] for rows in self.sizes[level])

    def plane(self, level: int, rows: int) -> tuple[int, int]:
        """Returns the rows and columns of a picture with so many `rows` along the split side."""
        return (rows, self.widths[level]) if self.dim == -2 else (self.widths[level], rows)


def levels_of(shape: torch.Size, depth: int, ranks: MeshDim, *, only_multiples: bool = False) -> Levels | None:
    """Returns the levels along the longer side of a latent [..., H, W], or else the other; None where neither has a row
    for each rank at the last level, or where two levels could not be told apart; `only_multiples` as in a RowPlan."""
    for dim, last in sides_to_cut(shape, depth, only_multiples=only_multiples):
        if last < ranks.size:
            continue
        rows, across, ends = shape[dim], shape[-3 - dim], [0]
        # Of the last level each rank ends next to its quota of the latent's rows, and has one row at least.
        for number, quota in enumerate(accumulate(chunk_sizes(rows, ranks.parts)), 1):
            end = round(quota / 2**depth) if number < ranks.size else last
            ends.append(min(max(end, ends[-1] + 1), last - (ranks.size - number)))
        units = tuple(end - begin for begin, end in pairwise(ends))
        return Levels(ranks=ranks, dim=dim, units=units, rows=rows, across=across, depth=depth)
    return None


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


Options = dict[str, Any]
Patch = Callable[..., Any]
PICTURES = ("input_block_patch", "input_block_patch_after_skip", "output_block_patch")
SELF, CROSS = "attn1", "attn2"


class FullPatches:
    """Patches run in the context `undivided`. `has_full_tokens`: the current attention has all tokens, for a patch."""

    def __init__(self, undivided: Callable[[], AbstractContextManager[None]]) -> None:
        self.has_full_tokens = False
        self.over_time = False  # a block attends along time, each pixel for itself
        self._undivided = undivided
        self._levels: Levels
        self._shape: list[int] = []

    def of(self, options: Options, levels: Levels, shape: list[int]) -> Options:
        """Returns the patches of transformer_options, for a forward of these levels of a latent [B, C, H, W]."""
        self._levels, self._shape = levels, shape
        self.has_full_tokens = self.over_time = False
        by_kind: dict[str, list[Any]] = options.get("patches") or {}
        of_pictures: dict[str, Patch] = {kind: self._picture for kind in PICTURES}
        of_pictures |= {"middle_block_after_patch": self._middle, "middle_patch": self._between}
        patches = {
            kind: [
                partial(of_pictures[kind], patch) if kind in of_pictures and not sees_each_token(patch) else patch
                for patch in of_kind
            ]
            for kind, of_kind in by_kind.items()
        }
        if layers := by_kind.get("forward_timestep_embed_patch"):
            patches["forward_timestep_embed_patch"] = [(kind, partial(self._layer, patch)) for kind, patch in layers]
        for kind in (SELF, CROSS):
            first, last = by_kind.get(f"{kind}_patch", []), by_kind.get(f"{kind}_output_patch", [])
            if not all(map(sees_each_token, [*first, *last])):
                patches[f"{kind}_patch"] = [partial(self._gather, kind), *(partial(self._call, p) for p in first)]
                patches[f"{kind}_output_patch"] = [*(partial(self._call, p) for p in last), self._split]
        replaced = {kind: dict(by_block) for kind, by_block in (options.get("patches_replace") or {}).items()}
        for kind in replaced.keys() & {SELF, CROSS}:
            replaced[kind] = {at: partial(self._attention, kind, patch) for at, patch in replaced[kind].items()}
        return {"patches": patches, "patches_replace": replaced}

    def _full_options(self, options: Options) -> Options:
        full = {**options, "original_shape": self._shape}
        if "activations_shape" in options:
            full["activations_shape"] = self._levels.full_shape(options["activations_shape"])
        return full

    def _call(self, patch: Patch, *arguments: Any, **more: Any) -> Any:
        """Calls a patch with full tensors, and the options last."""
        *tensors, options = arguments
        with self._undivided():
            return patch(*tensors, self._full_options(options), **more)

    def _picture(self, patch: Patch, *arguments: Any) -> Any:
        """Calls a patch of an input or output block, which takes pictures and the options."""
        *pictures, options = arguments
        full = [self._levels.gather(x) for x in pictures]
        output = self._call(patch, *full, options)
        if not isinstance(output, tuple):
            return self._split_picture(output, full[0])
        return tuple(None if x is None else self._split_picture(x, of) for x, of in zip(output, full, strict=True))

    def _split_picture(self, output: Tensor, before: Tensor) -> Tensor:
        """Returns this rank's rows. Raises NoLevel for a picture of another size than before (Deep Shrink)."""
        if output.shape[-2:] != before.shape[-2:]:
            raise self._levels.no_level("a picture", output.shape)
        return self._levels.split(output)

    def _middle(self, patch: Patch, arguments: Options) -> Options:
        full = {name: self._levels.gather(arguments[name]) for name in ("h", "x")}
        options = {"transformer_options": self._full_options(arguments["transformer_options"])}
        with self._undivided():
            output = patch({**arguments, **full, **options})
        return {**output, "h": self._levels.split(output["h"])}

    def _layer(self, patch: Patch, layer: Any, x: Tensor, emb: Any, context: Any, *arguments: Any) -> Tensor:
        options, shape, *more = arguments
        full = self._levels.gather(x)
        if shape is not None:
            shape = self._levels.full_shape(list(shape))
        with self._undivided():
            output = patch(layer, full, emb, context, self._full_options(options), shape, *more)
        return self._levels.split(output)

    def _between(self, patch: Patch, x: Tensor, extra: Options) -> Tensor:
        """Calls a middle_patch, which takes tokens between the two attentions of a block."""
        level = self._level(extra)
        output = self._call(patch, self._levels.gather_tokens(x, level), extra)
        return self._levels.split_tokens(output, level)

    def _gather(self, kind: str, n: Tensor, key: Any, value: Any, extra: Options) -> tuple[Any, Any, Any]:
        """Acts as the first patch of an attention: from here to `_split` its tokens are full."""
        full = self._levels.gather_tokens(n, self._level(extra))
        self.has_full_tokens = True
        return (full, full, full) if kind == SELF and key is n else (full, key, value)

    def _split(self, n: Tensor, extra: Options) -> Tensor:
        self.has_full_tokens = False
        return self._levels.split_tokens(n, self._level(extra))

    def _attention(self, kind: str, patch: Patch, q: Tensor, k: Tensor, v: Tensor, extra: Options, **more: Any) -> Any:
        """Replaces an attention, or runs within one that has full tokens by then."""
        if self.has_full_tokens:
            return self._call(patch, q, k, v, extra, **more)
        level = self._level(extra)
        q, *keys = (self._levels.gather_tokens(x, level) for x in ((q, k, v) if kind == SELF else (q,)))
        k, v = keys or (k, v)
        return self._levels.split_tokens(self._call(patch, q, k, v, extra, **more), level)

    def _level(self, extra: Options) -> int:
        """Returns the level of a block's tokens. Raises NoLevel for a block that attends along time."""
        shape = extra["activations_shape"]
        if self.over_time:
            raise self._levels.no_level("attention along time", shape)
        return self._levels.level(shape, "a patch")
