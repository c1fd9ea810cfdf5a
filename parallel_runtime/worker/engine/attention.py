"""One attention over cut streams, exact for every combination of ring and Ulysses degree. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ...errors import Refused
from ...specs import AttentionBackend, Parallelism
from .choosing import Sizes, chosen
from .exchange import Pending, Spare, allocate, gather
from .kernels import attempt, attend_block, attend_natively, for_heads, head_by_head
from .masks import Mask, ToldApart, exchange_mask, mask_of_patch, pair_mask, same_memory
from .merge import Merge
from .mesh import ContextMesh
from .opaque import attend_opaquely, enlist
from .operators import Whole
from .patches import Patches
from .ring import Block, Owners, Stop, collect, packed_bytes, rotate, stops
from .streams import KEPT_BYTES, Holding, Streams, chunk_sizes
from .ulysses import WAVES, Parcel, Wave, place, split, to_heads, to_tokens, waves

OnHeads = Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """What an attention goes by beyond its tensors: found out once a forward, of shapes alone, so alike on all ranks.

    `blocks` are the keys at each place of the ring, `largest` what the busiest rank attends to of them at once.
    `repeat_keys`: first give each query head keys of its own.
    """

    queries: Holding
    keys: Holding
    blocks: tuple[int, ...]
    largest: Sizes
    repeat_keys: bool
    waves: tuple[Wave, ...]


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """Attention of the ranks of a context mesh; `queries` and `keys` are the streams that each concatenates.

    `keys` None: those of the queries. `own` attends where keys are whole and no other kernel is chosen, [B, tokens, H,
    D] each and a mask [B, 1 or H, 1 or queries, keys]; none is where `fixed` says so. The ranks may have one of
    `patches` alone, which keep the keys of the others.
    """

    mesh: ContextMesh
    parallelism: Parallelism
    streams: Streams
    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    own: Whole = attend_natively
    fixed: Callable[[], bool] = lambda: False
    patches: Patches | None = None
    number: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", enlist(self))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Each rank passes its own tokens [B, own tokens, H, D] and gets its own rows of the whole attention.

        Keys and values may have fewer heads, each for a group of neighbouring query heads. `mask` is a key-padding
        mask, see `exchange_mask`, or a whole mask of pairs, see `pair_mask`. Collective over the context ranks.
        """
        if torch.compiler.is_compiling():
            return attend_opaquely(query, key, value, mask, scale, self.number, [])
        return self._run(query, key, value, mask, scale)

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        if torch.is_grad_enabled() and query.requires_grad:
            raise ValueError("context parallelism here is for inference; wrap the call in torch.no_grad()")
        shapes = (self, query.shape, key.shape, query.dtype)
        held = self.streams.kept(shapes, lambda: self._arrange(query, key))
        keys = None if mask is None else self._all_keys(mask, query, held)
        on_heads: OnHeads = partial(self._on_heads, held, scale)
        attend_all = on_heads if self.mesh.ulysses.size == 1 else partial(self._traded, held, on_heads)
        out = attend_all(held.queries.drop(query), held.keys.drop(key), held.keys.drop(value), keys)
        return held.queries.restore(out, self._replica)

    def _arrange(self, query: Tensor, key: Tensor) -> Arrangement:
        """For queries [B, own tokens, H, D]; Refused for others."""
        queries, keys = map(self.streams.held, self._sides)
        self._check(query, key, queries.size, keys.size)
        ranks, heads, key_heads = self.mesh.ulysses.size, query.shape[2], key.shape[2]
        by_rank = chunk_sizes(heads, self.mesh.ulysses.parts)
        repeat = any(own % (heads // key_heads) for own in by_rank)  # a rank's query heads need a part of a group
        counts = (heads, heads if repeat else key_heads)
        spreads = self.streams.spread(self._sides[0]), self.streams.spread(self._sides[1])
        most = WAVES if self.patches is None else 1  # what is kept of an attention is kept at once
        made = waves(self.mesh, query, counts, spreads, self._sides[0] == self._sides[1], most)
        of_queries, blocks = (_by_place(spread, ranks) for spread in spreads)
        attended = max(blocks) if self._whole else self.streams.total(self._sides[1])
        largest = Sizes(
            batch=query.shape[0],
            queries=max(of_queries),
            keys=attended,
            heads=-(-max(by_rank) // max(1, len(made))),
            head_dim=query.shape[3],
            dtype=query.dtype,
        )
        return Arrangement(queries=queries, keys=keys, blocks=blocks, largest=largest, repeat_keys=repeat, waves=made)

    def _check(self, query: Tensor, key: Tensor, queries: int, keys: int) -> None:
        if query.shape[1] != queries or key.shape[1] != keys:
            raise Refused(
                f"attention of {self._sides[0]} over {self._sides[1]} expects {queries} queries and {keys} keys on "
                f"this rank, got {query.shape[1]} and {key.shape[1]}; name its streams in the plan, or mark it local "
                "if its keys are whole"
            )
        if query.shape[2] % key.shape[2]:
            raise Refused(f"{query.shape[2]} query heads cannot be grouped under {key.shape[2]} key heads")

    def _replica(self, chunk: Tensor, length: int) -> Tensor:
        """[B, own tokens, H, D] of every rank makes [B, `length`, H, D] on each."""
        axis = self.mesh.context
        (whole,) = gather(chunk.transpose(0, 1), chunk_sizes(length, axis.parts), axis).wait()
        return whole.transpose(0, 1)

    def _all_keys(self, mask: Tensor, query: Tensor, held: Arrangement) -> Mask:
        """The mask of all keys; one that the layer before had too is not exchanged again."""
        batch, heads = query.shape[0], query.shape[2]
        last = self.streams.kept((self, "mask", batch, heads), _Exchanged)
        if last.given is None or same_memory(last.given) != same_memory(mask):
            streams, (of_queries, of_keys) = self.streams, self._sides
            if not self._whole:
                last.keys = mask_of_patch(mask, batch, heads, streams, of_queries, of_keys)
            elif mask.ndim == 4 and mask.shape[2] > 1:
                last.keys = pair_mask(mask, streams, of_queries, of_keys, self.mesh)
            else:
                own = held.keys.drop(mask, dim=-1) if mask.shape[-1] == held.keys.size else mask
                last.keys = exchange_mask(own, batch, heads, streams, of_keys, self.mesh.context)
            last.given = mask
        return last.keys

    def _traded(
        self,
        held: Arrangement,
        on_heads: OnHeads,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Mask | None,
    ) -> Tensor:
        """Tokens for heads, attention on those, and back."""
        if held.repeat_keys:
            key, value = for_heads(key, query.shape[2]), for_heads(value, query.shape[2])
        axis, returning = self.mesh.ulysses, []
        for wave, arrived in self._arriving(held.waves, query, key, value):
            of_wave = None if keys is None else keys.heads(wave.first, *wave.back.heads)
            q, k, v = arrived
            out = on_heads(q, k, v, of_wave)
            del q, k, v
            arrived.clear()
            returning.append((wave, to_tokens(out, wave.back, axis, self._spare(query, wave.number))))
        del out
        whole = allocate(query.shape, query)
        for wave, pending in returning:
            (returned,) = pending.wait()
            place(returned, wave.back, whole)
        return whole

    def _arriving(
        self, waves: Sequence[Wave], query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[Wave, list[Tensor]]]:
        """Each wave with its queries, keys and values on this rank's heads; the next travels meanwhile."""

        def start(wave: Wave) -> list[tuple[Pending, Parcel]]:
            tensors = [[query, key, value]] if len(wave.there) == 1 else [[query], [key, value]]
            uses = [self._spare(query, (wave.number, part)) for part in range(len(tensors))]
            return [
                (to_heads(some, parcel, self.mesh.ulysses, use), parcel)
                for some, parcel, use in zip(tensors, wave.there, uses, strict=True)
            ]

        coming = start(waves[0])
        for wave in waves:
            arrived = [part for pending, parcel in coming for part in split(pending.wait()[0], parcel)]
            coming.clear()  # and with it the send buffers
            if wave.number + 1 < len(waves):
                coming = start(waves[wave.number + 1])
            yield wave, arrived

    def _on_heads(
        self,
        held: Arrangement,
        scale: float | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Mask | None,
    ) -> Tensor:
        """`query` [B, Sq, heads, D] over the ring; this rank's block of it are `key` and `value`."""
        query = head_by_head(query)
        if self.patches is not None:
            key, value = self._of_all(self.patches, key, value)
        if self.mesh.ring.size > 1:
            return self._ring(held, scale, query, key, value, keys)
        mask = None if keys is None else keys.block(0, key.shape[1])
        backend = self._chosen(query, held, None if keys is None else keys.told_apart)
        if query.numel() == 0:
            return allocate(query.shape, query)
        key, value = head_by_head(key), head_by_head(value)
        out = None if backend == "auto" else attempt(query, key, value, mask, scale, backend)
        return self.own(query, key, value, mask, scale) if out is None else out

    def _of_all(self, patches: Patches, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        names = self._sides[1]
        places = self.streams.kept(("places", names), lambda: self.streams.places(names, key.device))
        return patches.attended(key, value, places, self.streams.total(names))

    @property
    def _whole(self) -> bool:
        """Do the ranks have all tokens together?"""
        return self.patches is None or self.patches.whole

    def _ring(
        self,
        held: Arrangement,
        scale: float | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Mask | None,
    ) -> Tensor:
        merge, blocks = Merge(in_float32=self.parallelism.convert_to_fp32), held.blocks
        backend = self._chosen(query, held, None)
        for owners, (k, v) in self._visited((key, value), blocks):
            if query.numel() == 0 or k.numel() == 0:
                continue
            bias = None
            if keys is not None:
                spans = tuple((sum(blocks[:owner]), blocks[owner]) for owner in owners if blocks[owner])
                if all(keys.hides(*span) for span in spans):
                    continue
                bias = keys.bias(spans, query.dtype)
            merge.add(*attend_block(query, k, v, bias, scale, backend))
        return merge.result(query, None if keys is None else keys.dead())

    def _chosen(self, query: Tensor, held: Arrangement, mask: ToldApart | None) -> AttentionBackend:
        """The kernel of this forward's attentions that are alike."""
        if self.fixed():
            return "auto"
        return self.streams.kept((held, "kernel", mask), lambda: self._choose(query, held.largest, mask))

    def _choose(self, query: Tensor, largest: Sizes, mask: ToldApart | None) -> AttentionBackend:
        backend, axis, lanes = self.parallelism.attention_backend, self.mesh.context, self.mesh.lanes
        recorded = self.parallelism.cuda_graphs != "off"
        sizes = largest if self.mesh.ring.size > 1 else replace(largest, what="whole", mask=mask)
        return chosen(backend, query, sizes, axis, self.own, lanes, recorded)

    def _visited(self, block: Block, blocks: tuple[int, ...]) -> Iterator[tuple[Owners, Block]]:
        axis = self.mesh.ring
        if self.parallelism.rotate_method == "allgather":
            return collect(block, blocks, axis)

        def make() -> list[Stop]:
            return stops(block, blocks, axis, self._spare(block[0], "ring"))

        if packed_bytes(block, blocks) > KEPT_BYTES:
            return rotate(block, make(), axis)
        key = ("stops", blocks, block[0].shape, block[0].dtype, torch.is_inference_mode_enabled())
        return rotate(block, self.streams.kept(key, make), axis)

    def _spare(self, like: Tensor, use: Hashable) -> Spare:
        return lambda shape, part: self.streams.spare((use, part), shape, like)

    @property
    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.queries, self.queries if self.keys is None else self.keys


def _by_place(spread: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Tokens at each place of the ring, of `ranks` ranks each."""
    return tuple(sum(spread[start : start + ranks]) for start in range(0, len(spread), ranks))


class _Exchanged:
    """A mask as a layer gave it, kept alive so that its memory stays its own, and what was made of it."""

    given: Tensor | None = None
    keys: Mask
