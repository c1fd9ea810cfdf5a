"""What an attention needs to know beyond its tensors: who holds which tokens, which heads travel when. Pure counting.

It depends on shapes alone, so that a forward finds it out once and not once a layer; and every rank finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...errors import Refused
from .holdings import Holding
from .mesh import ContextMesh
from .race import Sizes
from .streams import Streams
from .ulysses import Parcel, first_head, parcel

WAVES = 2  # at most: more would cut kernels too small
# Of queries, keys and values that a rank sends in a layer. What travels behind the first wave's kernels costs their
# launches once more, some 60 us; 32 MiB travel for 100 us at NVLink's speed.
WORTH_HIDING = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Heads that travel, and are attended to, together; `first` is the first of this rank's query heads in it.

    `there` are queries, keys and values in one parcel, or, where keys are other tokens, queries and then the rest.
    """

    number: int
    first: int
    there: tuple[Parcel, ...]
    back: Parcel


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """`blocks` are the keys at each place of the ring, `largest` what the busiest rank attends to of them at once.
    `repeat_keys`: first give each query head keys of its own.
    """

    queries: Holding
    keys: Holding
    blocks: tuple[int, ...]
    largest: Sizes
    repeat_keys: bool
    waves: tuple[Wave, ...]


def arrange(
    mesh: ContextMesh, streams: Streams, sides: tuple[tuple[str, ...], tuple[str, ...]], query: Tensor, key: Tensor
) -> Arrangement:
    """For queries [B, own tokens, H, D] of the streams `sides[0]` and keys of `sides[1]`; Refused for others."""
    queries, keys = (streams.held(names, mesh.context.index) for names in sides)
    _check(query, key, queries.size, keys.size, sides)
    ranks, heads, key_heads = mesh.ulysses.size, query.shape[2], key.shape[2]
    repeat = bool(key_heads % ranks)  # a rank's query heads may need a part of a group
    of_queries, of_keys = (_by_place(streams.spread(names), ranks) for names in sides)
    tokens = of_queries[mesh.ring.index], of_keys[mesh.ring.index]
    counts = (heads, heads if repeat else key_heads)
    number = _worthwhile(query, counts, max(map(max, of_queries)), max(map(max, of_keys)), ranks)
    together = sides[0] == sides[1]
    waves = [_wave(mesh, query, counts, tokens, together, wave, number) for wave in range(number if ranks > 1 else 0)]
    blocks = tuple(map(sum, of_keys))
    largest = Sizes(
        batch=query.shape[0],
        queries=max(map(sum, of_queries)),
        keys=max(blocks),
        heads=-(-heads // (ranks * number)),
        head_dim=query.shape[3],
        dtype=query.dtype,
    )
    return Arrangement(
        queries=queries, keys=keys, blocks=blocks, largest=largest, repeat_keys=repeat, waves=tuple(waves)
    )


def _wave(
    mesh: ContextMesh,
    query: Tensor,
    counts: tuple[int, int],
    tokens: tuple[tuple[int, ...], tuple[int, ...]],
    together: bool,
    wave: int,
    waves: int,
) -> Wave:
    (heads, key_heads), axis = counts, mesh.ulysses
    batch, _, _, dim = query.shape
    whole = ((heads, key_heads, key_heads),) if together else ((heads,), (key_heads, key_heads))
    there = [parcel(some, of, axis.index, batch, dim, wave, waves) for some, of in zip(whole, tokens, strict=False)]
    back = parcel((heads,), tokens[0], axis.index, batch, dim, wave, waves)
    first = first_head(heads, axis.size, axis.index, wave, waves)
    return Wave(number=wave, first=first, there=tuple(there), back=back)


def _worthwhile(query: Tensor, counts: tuple[int, int], queries: int, keys: int, ranks: int) -> int:
    """Of global counts alone: ranks that disagree would wait for each other's waves."""
    heads, key_heads = counts
    if key_heads < heads and key_heads % (ranks * WAVES):
        return 1
    sent = query.shape[0] * query.shape[3] * query.element_size() * (heads * queries + 2 * key_heads * keys)
    return WAVES if sent >= WORTH_HIDING else 1


def _by_place(spread: tuple[int, ...], ranks: int) -> list[tuple[int, ...]]:
    """Tokens of each rank of each place in the ring."""
    return [spread[start : start + ranks] for start in range(0, len(spread), ranks)]


def _check(query: Tensor, key: Tensor, queries: int, keys: int, sides: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    if query.shape[1] != queries or key.shape[1] != keys:
        raise Refused(
            f"attention of {sides[0]} over {sides[1]} expects {queries} queries and {keys} keys on this rank, got "
            f"{query.shape[1]} and {key.shape[1]}; name its streams in the plan, or mark it local if its keys are whole"
        )
    if query.shape[2] % key.shape[2]:
        raise Refused(f"{query.shape[2]} query heads cannot be grouped under {key.shape[2]} key heads")
