"""PipeFusion: the tokens of an evaluation in patches, which follow one another through the stages of a pipeline.

A token patch attends to the keys and values of all tokens: this evaluation's for the patches before it, the previous
step's for the patches after it. Text goes with the first patch. A branch's first evaluation processes all tokens at
once, and is exact. Knows no network, no plan and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import Refused, Unsplittable


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
        self._turn: int | None = None  # the current patch; None: all tokens at once
        self._sizes: dict[str, tuple[int, ...]] = {}  # tokens of each patch, by stream
        self._gathered_parts: dict[Hashable, list[Tensor]] = {}
        self._attention: tuple[Hashable, int] = (None, 0)  # the current block, and its attentions so far

    @property
    def has_all_tokens(self) -> bool:
        """Returns whether all tokens are processed at once."""
        return self._turn is None

    def reset(self) -> None:
        """Forgets all keys and values: a run begins or ends."""
        self.exact = False
        self._branches.clear()
        self._current = _Branch()
        self._end_turns()

    def _end_turns(self) -> None:
        self._turn, self._attention = None, (None, 0)
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

    def turns(self, key: Hashable, lengths: Callable[[], Mapping[str, int]]) -> Iterator[None]:
        """Runs one evaluation of the branch `key`: yields once for each patch, or once for all tokens. `lengths`, of
        the streams, is called at the end."""
        key_in_step = (0 if self._step_keys is None else len(self._step_keys), key)
        if self._step_keys is not None:
            self._step_keys.append(key_in_step)
        previous = self._branches.pop(key_in_step, None)
        exact = self.exact or previous is None
        self._current = _Branch() if exact or previous is None else previous
        self._sizes = {} if exact else patch_sizes(self._current.lengths, self._main, self._count)
        for turn in [None] if exact else range(self._count):
            self._begin_turn(turn)
            yield
        if exact:
            self._current.lengths = dict(lengths())
            patch_sizes(self._current.lengths, self._main, self._count)
        self._branches[key_in_step] = self._current
        self._end_turns()

    def _begin_turn(self, turn: int | None) -> None:
        self._turn, self._attention = turn, (None, 0)
        if not turn:
            self._gathered_parts.clear()
        self.before_turn()

    def active_range(self, stream: str, length: int) -> tuple[int, int]:
        """Returns (start, size) of the current patch among the `length` tokens of `stream`."""
        if self._turn is None:
            return 0, length
        if self._current.lengths.get(stream) != length:
            before = self._current.lengths.get(stream, 0)
            detail = f"{stream} has {length} tokens, and in the step before {before}, which its cached keys are of"
            raise Unsplittable(detail, "patches")
        sizes = self._sizes[stream]
        return sum(sizes[: self._turn]), sizes[self._turn]

    @torch.compiler.disable
    def enter_block(self, block: Hashable, _: object = None) -> None:
        """Notes, as a forward pre-hook of `block`, that the attentions that follow are this block's."""
        self._attention = (block, 0)

    def update_kv(self, key: Tensor, value: Tensor, positions: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Records keys and values [B, tokens, heads, head size] of the tokens at these positions of `total`. Returns
        those to attend to: the same where they are of all tokens, else those of all tokens as last recorded."""
        block, number = self._attention
        self._attention = (block, number + 1)
        if self._turn is None:
            copies = _scatter(key, positions, total), _scatter(value, positions, total)
            self._current.cached_kv[self._attention] = copies
            return key, value
        keys, values = self._current.cached_kv[self._attention]
        return keys.index_copy_(1, positions, key), values.index_copy_(1, positions, value)

    def gather(self, where: Hashable, part: Tensor, dim: int) -> Tensor | None:
        """Returns all patches' parts, after the last turn; None before it. `part` is this turn's."""
        if self._turn is None:
            return part
        parts = self._gathered_parts.setdefault(where, [])
        parts.append(part)
        if self._turn < self._count - 1:
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
