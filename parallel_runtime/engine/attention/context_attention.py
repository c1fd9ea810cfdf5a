"""Attention over split streams, exact for every combination of ring and Ulysses degree. Knows no model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import Unsplittable
from ...request import AttentionBackend
from ...specs import Parallelism
from ..comm.collectives import SCALE_BYTES, Pending, all_gather_v, allocate, from_float8, to_float8
from ..comm.mesh import ContextMesh
from ..split.streams import LocalTokens, Streams, chunk_sizes
from . import dispatch
from .masks import Mask, gather_key_mask, memory_key, pair_mask, patch_mask
from .registry import FullAttention
from .ring_and_ulysses import (
    MAX_HEAD_CHUNKS,
    AllToAllLayout,
    HeadChunk,
    Merge,
    exchange,
    head_chunks,
    split_received,
    to_heads,
    to_tokens,
    write_returned,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayout:
    """The sizes and transfers of one attention: computed once a forward, from shapes alone, so the same on all ranks.

    `key_counts` are the numbers of key tokens at each ring index. `repeat_keys`: repeat key heads first, so that each
    query head has its own."""

    queries: LocalTokens
    keys: LocalTokens
    key_counts: tuple[int, ...]
    repeat_keys: bool
    head_chunks: tuple[HeadChunk, ...]


@dataclass(eq=False)
class ContextAttention:
    """Attention of the ranks of a context mesh; queries and keys are those of the named streams, one after the other.

    `fallback` attends where keys are full and no kernel is chosen: [B, tokens, H, D] each and a mask [B, 1 or H,
    1 or queries, keys], once for each of at most `max_chunks` parts of the heads. It gets tokens rank by rank or, for
    a function that depends on their order, `in_order` of the full streams. With PipeFusion ranks may have the tokens of
    one token patch, and cached keys of the others."""

    mesh: ContextMesh
    parallelism: Parallelism
    streams: Streams
    query_streams: tuple[str, ...]
    key_streams: tuple[str, ...]
    fallback: FullAttention = dispatch.attend_native
    max_chunks: int = MAX_HEAD_CHUNKS
    in_order: bool = False

    def __post_init__(self) -> None:
        self._op_id = dispatch.register(self)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Returns the rows of the full attention of this rank's local tokens; tensors are [B, local tokens, H, D].

        Keys and values may have fewer heads, each for a group of neighbouring query heads. `mask` is a key-padding
        mask, see `gather_key_mask`, or a full mask of pairs, see `pair_mask`. Collective over the context ranks."""
        if torch.compiler.is_compiling():
            return dispatch.attend_op(query, key, value, mask, scale, self._op_id, [])
        return self._run(query, key, value, mask, scale)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        if torch.is_grad_enabled() and query.requires_grad:
            raise ValueError("context parallelism here is for inference; wrap the call in torch.no_grad()")
        shapes = (self, query.shape, key.shape, query.dtype)
        layout = self.streams.cached(shapes, lambda: self._make_layout(query, key))
        full_mask = None if mask is None else self._full_mask(mask, query, layout)
        q, k, v = layout.queries.to_chunks(query), layout.keys.to_chunks(key), layout.keys.to_chunks(value)
        attend = self._attend_heads if self.mesh.ulysses.size == 1 else self._attend_ulysses
        out = attend(layout, scale, q, k, v, full_mask)
        return layout.queries.from_chunks(out, self._gather_replicated)

    def _make_layout(self, query: Tensor, key: Tensor) -> AttentionLayout:
        """Takes [B, local tokens, H, D]; raises Refused for other token counts."""
        queries, keys = map(self.streams.local_tokens, (self.query_streams, self.key_streams))
        if (query.shape[1], key.shape[1]) != (queries.size, keys.size):
            over, got = f"{self.query_streams} over {self.key_streams}", f"{query.shape[1]} and {key.shape[1]}"
            expected = f"{queries.size} queries and {keys.size} keys"
            raise Unsplittable(f"attention of {over} expects {expected} on this rank, got {got}")
        if query.shape[2] % key.shape[2]:
            raise Unsplittable(f"{query.shape[2]} query heads cannot be grouped under {key.shape[2]} key heads")
        ranks, heads, key_heads = self.mesh.ulysses.size, query.shape[2], key.shape[2]
        by_rank = chunk_sizes(heads, self.mesh.ulysses.parts)
        repeat = any(local % (heads // key_heads) for local in by_rank)  # a rank's query heads need a part of a group
        counts = (heads, heads if repeat else key_heads)
        of_keys = self.streams.tokens_by_rank(self.key_streams)
        tokens_by_rank = self.streams.tokens_by_rank(self.query_streams), of_keys
        # PipeFusion caches keys of all heads at once.
        max_chunks = self.max_chunks if self.streams.pipefusion is None else 1
        same_tokens = self.query_streams == self.key_streams
        added = SCALE_BYTES if self.parallelism.options.sends_float8 else 0
        chunks = head_chunks(self.mesh, query, counts, tokens_by_rank, same_tokens, max_chunks, added)
        return AttentionLayout(
            queries=queries,
            keys=keys,
            key_counts=tuple(sum(of_keys[first : first + ranks]) for first in range(0, len(of_keys), ranks)),
            repeat_keys=repeat,
            head_chunks=chunks,
        )

    def _gather_replicated(self, chunk: Tensor, length: int) -> Tensor:
        """Gathers [B, local tokens, H, D] of every rank to [B, `length`, H, D] on each."""
        mesh_dim = self.mesh.context
        (output,) = all_gather_v(chunk.transpose(0, 1), chunk_sizes(length, mesh_dim.parts), mesh_dim).wait()
        return output.transpose(0, 1)

    def _full_mask(self, mask: Tensor, query: Tensor, layout: AttentionLayout) -> Mask:
        """Returns the mask of all keys; the same mask in the next layer is not gathered again."""
        batch, heads = query.shape[0], query.shape[2]
        cached = self.streams.cached((self, "mask", batch, heads), _CachedMask)
        if cached.source is None or memory_key(cached.source) != memory_key(mask):
            if not self._has_all_tokens:
                cached.mask = patch_mask(mask, batch, heads, self.streams, self.query_streams, self.key_streams)
            elif mask.ndim == 4 and mask.shape[2] > 1:
                cached.mask = pair_mask(mask, self.streams, self.query_streams, self.key_streams, self.mesh)
            else:
                local = layout.keys.to_chunks(mask, dim=-1) if mask.shape[-1] == layout.keys.size else mask
                cached.mask = gather_key_mask(local, batch, heads, self.streams, self.key_streams, self.mesh.context)
            cached.source = mask
        return cached.mask

    def _attend_ulysses(
        self, layout: AttentionLayout, scale: float | None, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Tensor:
        """Exchanges tokens for heads in an all-to-all, attends on the local heads, and exchanges the outputs back."""
        if layout.repeat_keys:
            key, value = dispatch.repeat_kv(key, query.shape[2]), dispatch.repeat_kv(value, query.shape[2])
        float8, dtype = self.parallelism.options.sends_float8, query.dtype
        if float8:
            query, key, value = map(to_float8, (query, key, value))
        mesh_dim, pending_returns = self.mesh.ulysses, []
        for chunk, received in self._received_chunks(layout.head_chunks, query, key, value):
            chunk_mask = None if mask is None else mask.heads(chunk.first, *chunk.inbound.heads)
            q, k, v = (from_float8(part, dtype) for part in received) if float8 else received
            out = self._attend_heads(layout, scale, q, k, v, chunk_mask)
            del q, k, v
            received.clear()
            out = to_float8(out) if float8 else out
            pending_returns.append((chunk, to_tokens(out, chunk.inbound, mesh_dim, self.streams, chunk.number)))
        del out
        output = allocate(query.shape, query)
        for chunk, pending in pending_returns:
            (returned_heads,) = pending.wait()
            write_returned(returned_heads, chunk.inbound, output)
        return from_float8(output, dtype) if float8 else output

    def _received_chunks(
        self, chunks: Sequence[HeadChunk], query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[HeadChunk, list[Tensor]]]:
        """Yields each head chunk with its queries, keys and values; the next is sent meanwhile."""

        def start(chunk: HeadChunk) -> list[tuple[Pending, AllToAllLayout]]:
            tensors = [[query, key, value]] if len(chunk.outbound) == 1 else [[query], [key, value]]
            return [
                (to_heads(some, a2a_layout, self.mesh.ulysses, self.streams, (chunk.number, part)), a2a_layout)
                for part, (some, a2a_layout) in enumerate(zip(tensors, chunk.outbound, strict=True))
            ]

        in_flight = start(chunks[0])
        for chunk in chunks:
            received: list[Tensor] = []
            for pending, a2a_layout in in_flight:
                received += split_received(pending.wait()[0], a2a_layout)
            in_flight.clear()  # and with it the send buffers
            if chunk.number + 1 < len(chunks):
                in_flight = start(chunks[chunk.number + 1])
            yield chunk, received

    def _attend_heads(
        self, layout: AttentionLayout, scale: float | None, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Tensor:
        """Attends `query` [B, Sq, heads, D] over the ring, of which `key` and `value` are this rank's block."""
        query = dispatch.contiguous_by_head(query)
        if (pipefusion := self.streams.pipefusion) is not None:
            positions, total = self._places(self.key_streams, key.device), self.streams.total(self.key_streams)
            key, value = pipefusion.update_kv(key, value, positions, total)
        if self.mesh.ring.size > 1:
            return self._attend_ring(layout, scale, query, key, value, mask)
        own_mask = None if mask is None else mask.block(0, key.shape[1])
        backend = self._kernel(query, layout, None if mask is None else mask.kind)
        # Not before the kernel is chosen: ranks do that together, those without queries too.
        if query.numel() == 0:
            return allocate(query.shape, query)
        key, value = dispatch.contiguous_by_head(key), dispatch.contiguous_by_head(value)
        out = dispatch.try_kernel(query, key, value, own_mask, scale, backend)
        if out is not None:
            return out
        if not self.in_order or not self._has_all_tokens or len(self.query_streams + self.key_streams) == 2:
            return self.fallback(query, key, value, own_mask, scale)
        to_queries, to_keys = (self._places(names, query.device) for names in (self.query_streams, self.key_streams))
        from_queries, from_keys = to_queries.argsort(), to_keys.argsort()
        if own_mask is not None:
            own_mask = own_mask[..., from_keys] if own_mask.shape[-1] > 1 else own_mask
            own_mask = own_mask[..., from_queries, :] if own_mask.shape[-2] > 1 else own_mask
        out = self.fallback(query[:, from_queries], key[:, from_keys], value[:, from_keys], own_mask, scale)
        return out[:, to_queries]

    def _places(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Returns the positions in the full streams of all ranks' tokens."""
        return self.streams.cached(("order", names), lambda: self.streams.global_positions(names, device))

    @property
    def _has_all_tokens(self) -> bool:
        """Returns whether the ranks together have all tokens, not one token patch."""
        return self.streams.pipefusion is None or self.streams.pipefusion.has_all_tokens

    def _attend_ring(
        self, layout: AttentionLayout, scale: float | None, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Tensor:
        options, key_counts = self.parallelism.options, layout.key_counts
        merge, backend = Merge(in_float32=options.convert_to_fp32), self._kernel(query, layout, None)
        for owners, (k, v) in exchange((key, value), key_counts, self.mesh.ring, self.streams, options):
            if query.numel() == 0 or k.numel() == 0:
                continue
            bias = None
            if mask is not None:
                spans = tuple((sum(key_counts[:owner]), key_counts[owner]) for owner in owners if key_counts[owner])
                if all(mask.hides(*span) for span in spans):
                    continue
                bias = mask.bias(spans, query.dtype)
            merge.add(*dispatch.attend_block(query, k, v, bias, scale, backend))
        return merge.result(query, None if mask is None else mask.fully_masked())

    def _kernel(self, query: Tensor, layout: AttentionLayout, mask: dispatch.MaskKind | None) -> AttentionBackend:
        """Returns the kernel for this layout and kind of mask, chosen once a forward."""

        def choose() -> AttentionBackend:
            options = self.parallelism.options
            kind = dispatch.AttentionKind(query.shape[3], query.dtype, self.mesh.ring.size > 1, mask)
            recorded = options.cuda_graphs != "off"
            return dispatch.choose_kernel(options.attention_backend, query, kind, self.mesh.context, recorded)

        return self.streams.cached((layout, "kernel", mask), choose)


class _CachedMask:
    """A layer's mask (a reference, so that its memory is not reused) and the Mask made from it."""

    source: Tensor | None = None
    mask: Mask
