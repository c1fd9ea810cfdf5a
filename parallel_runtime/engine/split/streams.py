"""The token streams of the forward in progress: their lengths, and which of their tokens each rank has; and PipeFusion,
their tokens in patches, which follow one another through the stages of a pipeline.

Values that depend only on the lengths, and scratch memory that layers share, are cached here until the forward is over.

A token patch attends to the keys and values of all tokens: this evaluation's for the patches before it, the previous
step's for the patches after it. Text goes with the first patch. A branch's first evaluation processes all tokens at
once, and is exact."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import Refused, Unsplittable
from ..comm.collectives import all_gather_v, allocate, allocate_scratch
from ..comm.mesh import MeshDim, Parts


class TurnEnded(Exception):
    """Ends the turn of a token patch that is not the last: all that it needs of the network has run."""


@dataclass(eq=False)
class _Branch:
    """The state that one evaluation of a step leaves to the next step: lengths of its streams, and keys and values [B,
    all tokens, heads, head size] of each attention, in the streams' order."""

    lengths: dict[str, int] = field(default_factory=dict)
    cached_kv: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict)


class PipeFusion:
    """Splits the evaluations of a network into `count` token patches of its latent's stream `main`. While `exact` is
    set, evaluations process all tokens and only record keys and values. `before_turn` is called before each turn."""

    def __init__(self, count: int, main: str) -> None:
        self.exact = False
        self.before_turn: Callable[[], None] = lambda: None
        self._count = count
        self._main = main
        self._branches: dict[Hashable, _Branch] = {}
        self._step_keys: list[Hashable] | None = None  # keys of the evaluations in flight
        self._current = _Branch()
        self.turn: int | None = None  # the current patch; None: all tokens at once
        self._sizes: dict[str, tuple[int, ...]] = {}  # tokens of each patch, by stream
        self._gathered_parts: dict[Hashable, list[Tensor]] = {}
        self._attention: tuple[Hashable, int] = (None, 0)  # the current block, and its attentions so far

    def reset(self) -> None:
        """Forgets all keys and values: a run begins or ends."""
        self.exact = False
        self._branches.clear()
        self._current = _Branch()
        self._end_turns()

    def _end_turns(self) -> None:
        self.turn, self._attention = None, (None, 0)
        self._gathered_parts.clear()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """All evaluations inside belong to one sampler step, and are told apart by their order too. Cached keys of
        branches that are not seen in it are dropped."""
        self._step_keys = []
        try:
            yield
        finally:
            keys, self._step_keys = self._step_keys, None
            if keys:
                self._branches = {key: branch for key, branch in self._branches.items() if key in keys}

    def turns(self, key: Hashable, lengths: Mapping[str, int]) -> Iterator[None]:
        """Evaluates the branch `key`: yields once a patch, or once for all tokens. `lengths` are read at the end."""
        key_in_step = (0 if self._step_keys is None else len(self._step_keys), key)
        if self._step_keys is not None:
            self._step_keys.append(key_in_step)
        previous = self._branches.pop(key_in_step, None)
        exact = self.exact or previous is None
        self._current = _Branch() if exact or previous is None else previous
        self._sizes = {} if exact else patch_sizes(self._current.lengths, self._main, self._count)
        for turn in [None] if exact else range(self._count):
            self.turn, self._attention = turn, (None, 0)
            if not turn:
                self._gathered_parts.clear()
            self.before_turn()
            yield
        if exact:
            self._current.lengths = dict(lengths)
            patch_sizes(self._current.lengths, self._main, self._count)
        self._branches[key_in_step] = self._current
        self._end_turns()

    def active_range(self, stream: str, length: int) -> tuple[int, int]:
        """Returns (start, size) of the current patch among the `length` tokens of `stream`."""
        if self.turn is None:
            return 0, length
        if self._current.lengths.get(stream) != length:
            before = self._current.lengths.get(stream, 0)
            detail = f"{stream} has {length} tokens, and in the step before {before}, which its cached keys are of"
            raise Unsplittable(detail, "patches")
        sizes = self._sizes[stream]
        return sum(sizes[: self.turn]), sizes[self.turn]

    @torch.compiler.disable
    def enter_block(self, block: Hashable, _: object = None) -> None:
        """Notes, as a forward pre-hook of `block`, that the attentions that follow are this block's."""
        self._attention = (block, 0)

    def update_kv(self, key: Tensor, value: Tensor, positions: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Records keys and values [B, tokens, heads, head size] of the tokens at these positions of `total`. Returns
        those to attend to: the same where they are of all tokens, else those of all tokens as last recorded."""
        block, number = self._attention
        self._attention = (block, number + 1)
        if self.turn is None:
            copies = _scatter(key, positions, total), _scatter(value, positions, total)
            self._current.cached_kv[self._attention] = copies
            return key, value
        keys, values = self._current.cached_kv[self._attention]
        return keys.index_copy_(1, positions, key), values.index_copy_(1, positions, value)

    def gather(self, where: Hashable, part: Tensor, dim: int) -> Tensor | None:
        """Returns all patches' parts, after the last turn; None before it. `part` is this turn's."""
        if self.turn is None:
            return part
        parts = self._gathered_parts.setdefault(where, [])
        parts.append(part)
        if self.turn < self._count - 1:
            return None
        if len(parts) != self._count:
            raise Unsplittable(f"only {len(parts)} of {self._count} patches of {where} arrived", "patches")
        return torch.cat(parts, dim)


def _scatter(tensor: Tensor, positions: Tensor, total: int) -> Tensor:
    """Returns a copy of `tensor` in the order of `positions`, head by head: `tensor` may be a view of much more."""
    batch, _, heads, size = tensor.shape
    full = tensor.new_empty(batch, heads, total, size).transpose(1, 2)
    return full.index_copy_(1, positions, tensor)


def patch_sizes(lengths: Mapping[str, int], main: str, count: int) -> dict[str, tuple[int, ...]]:
    """Returns the tokens of each of `count` patches, by stream. All streams but `main` go with the first patch, which
    has fewer tokens of `main` in turn, at least one."""
    other_tokens, length = sum(lengths.values()) - lengths[main], lengths[main]
    if length < count:
        raise Refused("patches.tokens", "patches", patches=count, tokens=length, most=length)
    first = min(max(1, -(-(other_tokens + length) // count) - other_tokens), length - count + 1)
    quotient, remainder = divmod(length - first, count - 1)
    later = [quotient + 1] * remainder + [quotient] * (count - 1 - remainder)
    return {name: (first, *later) if name == main else (length, *[0] * (count - 1)) for name, length in lengths.items()}


SCRATCH_CACHE_BYTES = 32 << 20  # of one buffer; allocating a larger one costs little beside filling it

PARALLELIZED = "_context_parallel"  # the attribute of a parallel network; its value has `streams`

T = TypeVar("T")


# From the global count of tokens only, so that no size is ever sent.
@lru_cache(maxsize=4096)
def chunk_sizes(total: int, parts: Parts) -> tuple[int, ...]:
    """Returns the sizes of contiguous chunks of `total` items: of `parts` equal chunks, or in proportion to these
    shares.

    Each size is the chunk's quota, rounded up where rounding down would lose most, the earlier chunk first. So equal
    shares differ by at most one item, larger chunks first. A chunk is empty where its share is 0 or too small for an
    item. Every split of tokens and bytes follows this rule."""
    assert total >= 0
    shares = (1,) * parts if isinstance(parts, int) else parts
    share_sum = sum(shares)
    assert share_sum > 0
    assert min(shares) >= 0
    sizes = [total * share // share_sum for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: -(total * shares[index] % share_sum))
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


@lru_cache(maxsize=4096)
def chunk_range(total: int, parts: Parts, index: int) -> tuple[int, int]:
    """Returns (start, size) of chunk `index` among the chunks of `chunk_sizes`."""
    sizes = chunk_sizes(total, parts)
    return sum(sizes[:index]), sizes[index]


class LocalTokens:
    """This rank's tokens of several concatenated streams, `size` in all: `counts` of each stream, of which its chunk
    (start, size) are those whose queries it computes.

    A split stream has only its chunk, a `replicated` one all tokens. For an empty chunk the rank has one dummy token,
    which no attention and no gather sees: layers of diffusers reshape with -1, and fail on tensors of no elements."""

    def __init__(self, counts: list[int], chunks: list[tuple[int, int]], replicated: list[bool]) -> None:
        self.size = sum(counts)
        self._counts, self._chunks, self._replicated = counts, chunks, replicated

    @cached_property
    def _only_chunks(self) -> bool:
        return not any(self._replicated) and self._counts == [size for _, size in self._chunks]

    def to_chunks(self, local: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's chunks of the local tokens."""
        if self._only_chunks:
            return local
        pieces = zip(local.split(self._counts, dim), self._chunks, strict=True)
        return torch.cat([piece.narrow(dim, *chunk) for piece, chunk in pieces], dim)

    def from_chunks(self, out: Tensor, ranks: MeshDim) -> Tensor:
        """Undoes `to_chunks` along dim 1: gathers replicated streams from all `ranks`."""
        if self._only_chunks:
            return out
        local, chunks = [], out.split([size for _, size in self._chunks], 1)
        for chunk, count, replicated in zip(chunks, self._counts, self._replicated, strict=True):
            if replicated:
                local.append(all_gather_v(chunk, chunk_sizes(count, ranks.parts), ranks, 1))
            elif chunk.shape[1] == count:
                local.append(chunk)
            else:  # zeros for a dummy token
                local.append(chunk.new_zeros((chunk.shape[0], count, *chunk.shape[2:])))
        return torch.cat(local, 1)


class Streams:
    """The streams of one forward, split over the ranks of `mesh_dim`. Cleared between forwards.

    Every rank has all tokens of a `replicated` stream, and computes attention for its chunk of them. With `pipefusion`
    only the tokens of the current patch are split."""

    def __init__(
        self, mesh_dim: MeshDim, replicated: frozenset[str] = frozenset(), pipefusion: PipeFusion | None = None
    ) -> None:
        self.replicated = replicated
        self.pipefusion = pipefusion
        self._mesh_dim = mesh_dim
        self.lengths: dict[str, int] = {}  # global, of the streams split so far in this forward [tokens]
        self._cache: dict[Hashable, Any] = {}

    def clear(self) -> None:
        self.lengths.clear()
        self._cache.clear()

    @property
    def has_all_tokens(self) -> bool:
        """Returns whether the ranks together have all tokens, not one token patch."""
        return self.pipefusion is None or self.pipefusion.turn is None

    @property
    def any_split(self) -> bool:
        """Returns whether the network's variables contain a part of any stream at this moment."""
        return bool(self.lengths)

    def record_length(self, stream: str, length: int, where: str) -> None:
        """Records the global length of `stream` [tokens]; Refused if this forward has recorded another one."""
        known = self.lengths.setdefault(stream, length)
        if known != length:
            raise Unsplittable(f"{where} has {length} tokens, but stream {stream!r} was split with {known} before")

    def length(self, stream: str) -> int:
        """Returns the global length of `stream`; Refused before it is first split."""
        if stream not in self.lengths:
            seen = ", ".join(f"{name}={length}" for name, length in self.lengths.items()) or "none"
            raise Unsplittable(f"{stream!r} is used before the plan split it (so far: {seen})")
        return self.lengths[stream]

    def total(self, names: tuple[str, ...]) -> int:
        """Returns the sum of the global lengths of `names`."""
        return sum(map(self.length, names))

    def sizes(self, stream: str) -> tuple[int, ...]:
        """Returns the chunk size of `stream` on each rank."""
        return chunk_sizes(self._active_range(stream)[1], self._mesh_dim.parts)

    def chunk(self, stream: str, index: int | None = None) -> tuple[int, int]:
        """Returns (start, size) of the chunk of `stream` that the rank of this index has; this rank's without one."""
        index = self._mesh_dim.index if index is None else index
        first, _ = self._active_range(stream)
        sizes = self.sizes(stream)
        return first + sum(sizes[:index]), sizes[index]

    def _active_range(self, stream: str) -> tuple[int, int]:
        """Returns (start, size) of the tokens that the ranks split: all, or those of the current patch."""
        length = self.length(stream)
        return (0, length) if self.pipefusion is None else self.pipefusion.active_range(stream, length)

    def global_positions(
        self, names: tuple[str, ...], device: torch.device, ranks: Sequence[int] | None = None
    ) -> Tensor:
        """Returns the positions of the chunks of `ranks` (None: all) in the concatenated streams, rank by rank."""
        starts = [self.total(names[:n]) for n in range(len(names))]
        ranges = [
            (before + start, size)
            for index in (range(self._mesh_dim.size) if ranks is None else ranks)
            for before, (start, size) in zip(starts, (self.chunk(name, index) for name in names), strict=True)
        ]
        return torch.cat([torch.arange(start, start + size, device=device) for start, size in ranges])

    def local_tokens(self, names: tuple[str, ...]) -> LocalTokens:
        counts, chunks = [], []
        for name in names:
            length, (start, size) = self.length(name), self.chunk(name)
            replicated = name in self.replicated
            counts.append(length if replicated else max(size, min(length, 1)))
            chunks.append((start if replicated else 0, size))
        return LocalTokens(counts, chunks, [name in self.replicated for name in names])

    def local_count(self, names: tuple[str, ...]) -> int:
        """Returns the number of this rank's tokens of `names`."""
        return self.local_tokens(names).size

    def local_slice(self, full: Tensor, stream: str, dim: int) -> Tensor:
        """Returns a view of this rank's tokens of the full stream; of the first token where its chunk is empty."""
        if stream in self.replicated:
            return full
        start, size = self.chunk(stream)
        return full.narrow(dim, start, size) if size else full.narrow(dim, 0, min(full.shape[dim], 1))

    def tokens_by_rank(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Returns each rank's chunk sizes of `names`, summed, in context order."""
        return tuple(map(sum, zip(*map(self.sizes, names), strict=True)))

    def any_rank_has_all(self, names: tuple[str, ...]) -> bool:
        """Returns whether a rank has as many tokens of the split streams of `names` as there are in all. That rank
        cannot tell by a tensor's length whether it is split, so all ranks must do what is correct in both cases."""
        split = tuple(name for name in names if name not in self.replicated)
        by_rank = ([max(size, min(self.length(name), 1)) for size in self.sizes(name)] for name in split)
        return self.total(split) in map(sum, zip(*by_rank, strict=True))

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns `make()`, called once a forward for each `key`."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def scratch(self, use: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """Returns memory for `use`, which the next layer gets again: its contents are lost then."""
        key = (use, shape, like.dtype, like.device, torch.is_inference_mode_enabled())
        buffer: Tensor | None = self._cache.get(key)
        if buffer is None:
            if math.prod(shape) * like.element_size() > SCRATCH_CACHE_BYTES:
                return allocate(shape, like)
            buffer = self._cache[key] = allocate_scratch(shape, like)
        return buffer


def streams_of(network: nn.Module) -> Streams | None:
    """Returns the split streams of the forward in progress; None where this rank has the full sequence."""
    return getattr(getattr(network, PARALLELIZED, None), "streams", None)
