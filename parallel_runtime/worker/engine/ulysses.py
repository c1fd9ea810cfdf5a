"""Trading tokens for heads and back: one all-to-all each way, over chunks and counts of any size.

On the wire tokens come first, and what belongs to one token lies together, [tokens, batch, heads, head_dim]: what
arrives from all ranks is then one tensor, whatever each had, and needs no copy. Knows no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from .exchange import Pending, Spare, exchange
from .mesh import Axis, ContextMesh, Parts
from .streams import chunk_range, chunk_sizes

WAVES = 2  # at most: more would cut kernels too small
# Of queries, keys and values that a rank sends in a layer. What travels behind the first wave's kernels costs their
# launches once more, some 60 us; 32 MiB travel for 100 us at NVLink's speed.
WORTH_HIDING = 32 << 20

Spreads = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of each context rank: of the queries, of the keys


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring ranks that own equally many `heads` each, from `first` on; `count` of each from `start` travel."""

    ranks: int
    first: int
    heads: int
    start: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """These heads of [B, tokens, H, D] as [ranks, tokens, B, count, D], a view."""
        batch, tokens, heads, dim = tensor.shape
        if heads != self.ranks * self.heads:
            tensor = tensor.narrow(2, self.first, self.ranks * self.heads)
        tensor = tensor.view(batch, tokens, self.ranks, self.heads, dim)
        if self.count != self.heads:
            tensor = tensor.narrow(3, self.start, self.count)
        return tensor.permute(2, 1, 0, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What travels in one exchange: tensors of the same tokens, cut by tokens on one side and by heads on the other.

    `runs` are of every tensor; `tokens` are each rank's, `heads` this rank's of each tensor. Elements are counted
    for each peer: `by_heads` are what this rank's tokens have for it, `by_tokens` what its own have for this rank.
    `even`: all counts of all ranks are the same, which every rank must say alike.
    """

    runs: tuple[tuple[Run, ...], ...]
    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    index: int
    batch: int
    dim: int
    by_heads: tuple[int, ...]
    by_tokens: tuple[int, ...]
    even: bool

    @property
    def counts(self) -> tuple[list[int] | None, list[int] | None]:
        """`by_heads` and `by_tokens` as a collective wants them."""
        return (None, None) if self.even else (list(self.by_heads), list(self.by_tokens))

    def segments(self, flat: Tensor) -> list[tuple[tuple[Run, ...], Tensor]]:
        """Each run of every tensor with its part [ranks, own tokens, B, heads, D] of what is cut by tokens."""
        own, start, parts = self.tokens[self.index], 0, []
        for runs in zip(*self.runs, strict=True):
            shape = (runs[0].ranks, own, self.batch, sum(run.count for run in runs), self.dim)
            size = shape[0] * shape[1] * shape[2] * shape[3] * shape[4]
            if size:
                parts.append((runs, flat.narrow(0, start, size).view(shape)))
            start += size
        return parts


@lru_cache(maxsize=1024)
def parcel(
    heads: tuple[int, ...],
    parts: Parts,
    tokens: tuple[int, ...],
    index: int,
    batch: int,
    dim: int,
    wave: int,
    waves: int,
) -> Parcel:
    """Tensors of `heads` each in part `wave` of `waves`. Ranks have the same multiple of each tensor's heads."""
    runs = tuple(_runs(count, parts, wave, waves) for count in heads)
    assert len({tuple(run.ranks for run in of_tensor) for of_tensor in runs}) == 1
    counts = [[run.count for run in of_tensor for _ in range(run.ranks)] for of_tensor in runs]
    by_rank = [sum(of_rank) for of_rank in zip(*counts, strict=True)]
    own = tuple(of_tensor[index] for of_tensor in counts)
    return Parcel(
        runs=runs,
        heads=own,
        tokens=tokens,
        index=index,
        batch=batch,
        dim=dim,
        by_heads=tuple(tokens[index] * batch * count * dim for count in by_rank),
        by_tokens=tuple(size * batch * sum(own) * dim for size in tokens),
        even=len(set(tokens)) == len(set(by_rank)) == 1,
    )


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Heads that travel, and are attended to, together; `first` is the first of this rank's query heads in it.

    `there` are queries, keys and values in one parcel, or, where keys are other tokens, queries and then the rest.
    """

    number: int
    first: int
    there: tuple[Parcel, ...]
    back: Parcel


def waves(
    mesh: ContextMesh, query: Tensor, heads: tuple[int, int], spreads: Spreads, together: bool, most: int = WAVES
) -> tuple[Wave, ...]:
    """For queries [B, tokens, H, D] and keys of so many `heads`, `together` where both are of the same tokens; `most`
    at most.

    None where there is nobody to trade with.
    """
    axis, first = mesh.ulysses, mesh.ring.index * mesh.ulysses.size
    if axis.size == 1:
        return ()
    of_queries, of_keys = heads[:1], (heads[1], heads[1])
    queries, keys = (spread[first : first + axis.size] for spread in spreads)
    there = [((*of_queries, *of_keys), queries)] if together else [(of_queries, queries), (of_keys, keys)]
    number = min(most, _worthwhile(query, heads, spreads, axis.parts))
    start, own = chunk_range(heads[0], axis.parts, axis.index)

    def packed(heads: tuple[int, ...], tokens: tuple[int, ...], wave: int) -> Parcel:
        return parcel(heads, axis.parts, tokens, axis.index, query.shape[0], query.shape[3], wave, number)

    return tuple(
        Wave(
            number=wave,
            first=start + chunk_range(own, number, wave)[0],
            there=tuple(packed(*each, wave) for each in there),
            back=packed(of_queries, queries, wave),
        )
        for wave in range(number)
    )


def _worthwhile(query: Tensor, heads: tuple[int, int], spreads: Spreads, parts: Parts) -> int:
    """Of global counts alone: ranks that disagree would wait for each other's waves."""
    (of_queries, of_keys), (queries, keys) = heads, map(max, spreads)
    if of_keys < of_queries and any(own % WAVES for own in chunk_sizes(of_keys, parts)):
        return 1
    sent = query.shape[0] * query.shape[3] * query.element_size() * (of_queries * queries + 2 * of_keys * keys)
    return WAVES if sent >= WORTH_HIDING else 1


def to_heads(tensors: Sequence[Tensor], parcel: Parcel, axis: Axis, spare: Spare) -> Pending:
    """[B, own tokens, H, D] of each tensor starts to become what `split` takes."""
    send = spare((sum(parcel.by_heads),), "send")
    for runs, segment in parcel.segments(send):
        torch.cat([run.of(tensor) for run, tensor in zip(runs, tensors, strict=True)], dim=3, out=segment)
    received = spare((sum(parcel.by_tokens),), "receive")
    return exchange(send, received, *parcel.counts, axis)


def split(received: Tensor, parcel: Parcel) -> tuple[Tensor, ...]:
    """What arrived: [B, all tokens, own heads, D] of each tensor, views."""
    whole = received.view(sum(parcel.tokens), parcel.batch, sum(parcel.heads), parcel.dim)
    return whole.transpose(0, 1).split(parcel.heads, 2)


def to_tokens(whole: Tensor, parcel: Parcel, axis: Axis, spare: Spare) -> Pending:
    """The way back starts: [B, all tokens, own heads, D] of each rank. `place` takes what arrives."""
    send = whole.transpose(0, 1).reshape(-1)
    received = spare((sum(parcel.by_heads),), "return")
    by_heads, by_tokens = parcel.counts
    return exchange(send, received, by_tokens, by_heads, axis)


def place(returned: Tensor, parcel: Parcel, out: Tensor) -> None:
    """Write the heads that came back to this rank into `out` [B, own tokens, H, D]."""
    for (run,), segment in parcel.segments(returned):
        run.of(out).copy_(segment)


def _runs(heads: int, parts: Parts, wave: int, waves: int) -> tuple[Run, ...]:
    runs, first = [], 0
    for own, alike in groupby(chunk_sizes(heads, parts)):
        start, count = chunk_range(own, waves, wave)
        runs.append(Run(ranks=len(list(alike)), first=first, heads=own, start=start, count=count))
        first += runs[-1].ranks * own
    return tuple(runs)
