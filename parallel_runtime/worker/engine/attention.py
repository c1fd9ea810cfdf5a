"""One attention over cut streams, exact for every combination of ring and Ulysses degree. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...specs import AttentionBackend, Parallelism
from .exchange import Pending, allocate, gather
from .kernels import attend, attend_block, for_heads
from .masks import KeyMask, exchange_mask
from .merge import Merge
from .mesh import ContextMesh
from .pair_masks import PairMask, pair_mask
from .ring import visit
from .sizes import chunk_sizes
from .streams import Streams
from .ulysses import Wave, place, to_heads, to_tokens, waves

# Heads go in so many parts: one is attended to while the next travels. More parts would cut kernels too small.
WAVES = 2

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """Attention of the ranks of a context mesh; `queries` and `keys` are the streams that each concatenates.

    `keys` None: those of the queries. `kernel` attends where keys are whole, [B, tokens, H, D] each and a mask
    [B, 1 or H, 1 or queries, keys]; None: what `parallelism` says.
    """

    mesh: ContextMesh
    parallelism: Parallelism
    streams: Streams
    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    kernel: Kernel | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Each rank passes its own tokens [B, own tokens, H, D] and gets its own rows of the whole attention.

        Keys and values may have fewer heads, each for a group of neighbouring query heads. `mask` is a key-padding
        mask, see `exchange_mask`, or a whole mask of pairs, see `pair_mask`. Collective over the context ranks.
        """
        queries, keys = (self.streams.held(names, self.mesh.context.index) for names in self._sides)
        self._check(query, key, queries.size, keys.size)
        if mask is not None and mask.shape[-1] == keys.size and not _is_of_pairs(mask):
            mask = keys.drop(mask, dim=-1)
        out = self._attend(queries.drop(query), keys.drop(key), keys.drop(value), mask, scale)
        return queries.restore(out, self._replica)

    def _replica(self, chunk: Tensor, length: int) -> Tensor:
        """[B, own tokens, H, D] of every rank makes [B, `length`, H, D] on each."""
        axis = self.mesh.context
        (whole,) = gather(chunk.transpose(0, 1), chunk_sizes(length, axis.size), axis).wait()
        return whole.transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        keys = None if mask is None else self._mask(mask, query.shape[0], query.shape[2])
        axis = self.mesh.ulysses
        of_queries, _ = self._tokens()
        returning = []
        for wave, q, k, v in self._travelling(query, key, value):
            of_wave = None if keys is None else keys.heads(*wave[axis.index])
            out = self._on_heads(q.transpose(0, 1), k, v, of_wave, scale)
            returning.append((wave, to_tokens(out.transpose(0, 1), wave, of_queries, axis)))
        del q, k, v, out
        whole = allocate(query.shape, query)
        for wave, pending in returning:
            (returned,) = pending.wait()
            place(returned, wave, whole)
        return whole

    def _mask(self, mask: Tensor, batch: int, heads: int) -> KeyMask | PairMask:
        of_queries, of_keys = ([self.streams.length(name) for name in names] for names in self._sides)
        if _is_of_pairs(mask):
            return pair_mask(mask, of_queries, of_keys, self.mesh)
        return exchange_mask(mask, batch, heads, of_keys, self.mesh.context)

    def _travelling(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Wave, Tensor, Tensor, Tensor]]:
        """Each wave with its heads that are this rank's, [tokens, B, heads, D]; the next travels meanwhile."""
        axis, heads, key_heads = self.mesh.ulysses, query.shape[2], key.shape[2]
        count = 1 if key_heads < heads and key_heads % (axis.size * WAVES) else WAVES
        if key_heads % axis.size:  # a rank's query heads may need a part of a group
            key, value = for_heads(key, heads), for_heads(value, heads)
        of_queries, of_keys = self._tokens()
        sent = ((query, of_queries), (key, of_keys), (value, of_keys))
        ways = [waves(tensor.shape[2], axis.size, count) for tensor, _ in sent]

        def start(index: int) -> list[Pending]:
            return [
                to_heads(tensor, way[index], tokens, axis) for (tensor, tokens), way in zip(sent, ways, strict=True)
            ]

        coming = start(0)
        for index, wave in enumerate(ways[0]):
            q, k, v = (tensor for pending in coming for tensor in pending.wait())
            coming.clear()  # and with it the send buffers
            if index + 1 < count:
                coming = start(index + 1)
            yield wave, q, k, v

    def _on_heads(
        self, query: Tensor, key: Tensor, value: Tensor, keys: KeyMask | PairMask | None, scale: float | None
    ) -> Tensor:
        """`query` [B, Sq, heads, D] over the ring; this rank's block of it are `key`, `value` [Sk, B, heads, D]."""
        if self.mesh.ring.size > 1:
            return self._ring(query, key, value, keys, scale)
        mask = None if keys is None else keys.block(0, key.shape[0])
        return self._whole(query, key.transpose(0, 1), value.transpose(0, 1), mask, scale)

    def _tokens(self) -> list[tuple[int, ...]]:
        """Query tokens and key tokens of each rank of this rank's Ulysses group."""
        return [self._spread(names)[self.mesh.ring.index] for names in self._sides]

    def _spread(self, names: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Tokens of each rank of each place in the ring."""
        spread, size = self.streams.spread(names), self.mesh.ulysses.size
        return [spread[start : start + size] for start in range(0, len(spread), size)]

    def _ring(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: KeyMask | PairMask | None,
        scale: float | None,
    ) -> Tensor:
        blocks = tuple(map(sum, self._spread(self._sides[1])))
        merge = Merge(in_float32=self.parallelism.convert_to_fp32)
        for owner, (k, v) in visit((key, value), blocks, self.mesh.ring, self.parallelism.rotate_method):
            if query.numel() == 0 or k.numel() == 0:
                continue
            mask = None if keys is None else keys.block(sum(blocks[:owner]), blocks[owner])
            if mask is not None and _hides_all(mask):
                continue
            merge.add(*attend_block(query, k.transpose(0, 1), v.transpose(0, 1), mask, scale, self._backend))
            del k, v  # the ring may need their memory
        return merge.result(query, None if keys is None else keys.dead())

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        if query.numel() == 0:
            return allocate(query.shape, query)
        if self.kernel is not None:
            return self.kernel(query, key, value, mask, scale)
        return attend(query, key, value, mask, scale, self._backend)

    def _check(self, query: Tensor, key: Tensor, queries: int, keys: int) -> None:
        if query.shape[1] != queries or key.shape[1] != keys:
            of_queries, of_keys = self._sides
            raise ValueError(
                f"attention of {of_queries} over {of_keys} expects {queries} queries and {keys} keys on this rank, got "
                f"{query.shape[1]} and {key.shape[1]}; name its streams in the plan, or mark it local if its keys are "
                "whole"
            )
        if query.shape[2] % key.shape[2]:
            raise ValueError(f"{query.shape[2]} query heads cannot be grouped under {key.shape[2]} key heads")
        if torch.is_grad_enabled() and query.requires_grad:
            raise ValueError("context parallelism here is for inference; wrap the call in torch.no_grad()")

    @property
    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.queries, self.queries if self.keys is None else self.keys

    @property
    def _backend(self) -> AttentionBackend:
        return self.parallelism.attention_backend


def _is_of_pairs(mask: Tensor) -> bool:
    return mask.ndim == 4 and mask.shape[2] > 1


def _hides_all(mask: Tensor) -> bool:
    """Worth a look only where it costs no wait for the device: blocks that are hidden anyway merge to nothing."""
    return mask.device.type == "cpu" and mask.dtype == torch.bool and not bool(mask.any())
