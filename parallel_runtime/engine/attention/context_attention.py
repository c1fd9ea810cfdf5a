"""Attention over split streams, exact for every combination of ring and Ulysses degree, and masks. Knows no model."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...architectures.split_plan import Names
from ...errors import Unsplittable
from ...request import AttentionBackend
from ...specs import Parallelism
from ..comm.collectives import SCALE_BYTES, Pending, all_gather_v, allocate, from_float8, to_float8
from ..comm.mesh import ContextMesh, MeshDim
from ..split.streams import LocalTokens, Streams, chunk_sizes
from . import dispatch, ring_and_ulysses
from .registry import FullAttention

Spans = tuple[tuple[int, int], ...]  # of keys: (start, size) of each


class Mask:
    """The mask of all keys of an attention, for the queries of this rank: `pairs` [1 or B, 1 or heads, 1 or queries,
    keys], bool or additive float, keys in context order.

    What layers ask for repeatedly is cached. `kind` is the same on all ranks, however few heads one has."""

    def __init__(self, pairs: Tensor, kind: dispatch.MaskKind) -> None:
        self.pairs = pairs
        self.kind = kind
        self._cache: dict[Hashable, Any] = {}

    def block(self, start: int, size: int) -> Tensor:
        """Returns [1 or B, 1 or heads, 1 or queries, size] of the keys from `start` on, for PyTorch's attention."""
        return self._cached(("block", start, size), lambda: self.pairs[..., start : start + size].contiguous())

    def bias(self, spans: Spans, dtype: torch.dtype) -> Tensor:
        """Returns the mask of several such spans of keys, one after the other, as a finite bias; see `additive`."""
        key = ("bias", spans, dtype)
        return self._cached(key, lambda: additive(torch.cat([self.block(*span) for span in spans], -1), dtype))

    def heads(self, start: int, size: int) -> "Mask":
        """Returns the mask of some of the heads."""
        if self.pairs.shape[1] == 1:
            return self
        return self._cached(("heads", start, size), lambda: Mask(self.pairs[:, start : start + size], self.kind))

    def fully_masked(self) -> Tensor:
        """Returns [1 or B, 1 or queries, 1 or heads, 1]: True where a query has no key, so that its output is zero."""

        def unseen() -> Tensor:
            seen = self.pairs if self.pairs.dtype == torch.bool else self.pairs > -torch.inf
            return ~seen.any(dim=-1, keepdim=True).transpose(1, 2)

        return self._cached("fully masked", unseen)

    def hides(self, start: int, size: int) -> bool:
        """Returns whether it is known that no query sees these keys."""
        # On a GPU a fully hidden block merges with weight 0 anyway, and to look would wait for the device.
        if self.pairs.device.type != "cpu" or self.pairs.dtype != torch.bool:
            return False
        return self._cached(("hides", start, size), lambda: not self.pairs[..., start : start + size].any().item())

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def _pair(pairs: Tensor, *, of_queries: bool = True) -> Mask:
    """Returns a mask of `pairs`, which differ between this rank's queries if `of_queries`. Numbers but 0 attend."""
    if not pairs.is_floating_point() and pairs.dtype != torch.bool:
        pairs = pairs != 0
    return Mask(pairs, (pairs.dtype, pairs.shape[0] > 1, pairs.shape[1] > 1, of_queries))


def _key(keys: Tensor) -> Mask:
    """Returns the mask `keys` [S, B, 1 or heads], which is the same for all queries."""
    return _pair(keys.permute(1, 2, 0).unsqueeze(2), of_queries=False)


def memory_key(mask: Tensor) -> Hashable:
    """Returns a key that is equal for tensors that show the same values, as long as one of them is alive."""
    version = None if mask.is_inference() else mask._version
    storage = mask.untyped_storage()._cdata
    return storage, mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, version


def gather_key_mask(mask: Tensor, batch: int, heads: int, streams: Streams, names: Names, mesh_dim: MeshDim) -> Mask:
    """Returns the mask of all keys, gathered from each rank's slice of it (or taken from the full mask, if it was not
    split).

    `mask` is [B, S] bool or int (non-zero: attend), [B, S] additive float, or [B, 1 or heads, 1, S] of either; `names`
    are the attention's streams, in the order in which its keys are concatenated. Raises Refused for masks that differ
    between queries: a rank sees only its own."""
    keys = _tokens_first(mask, batch, heads)
    sizes, total = streams.tokens_by_rank(names), streams.total(names)
    local = sizes[mesh_dim.index]
    if keys.shape[0] not in (local, total):
        raise Unsplittable(f"the mask covers {keys.shape[0]} keys, but this rank has {local} of {total}")
    if keys.shape[0] != local:
        if not streams.any_rank_has_all(names):
            return _key(keys.index_select(0, streams.global_positions(names, keys.device)))
        keys = keys.index_select(0, streams.global_positions(names, keys.device, [mesh_dim.index]))
    to_send = keys.to(torch.uint8) if keys.dtype == torch.bool else keys
    return _key(all_gather_v(to_send, sizes, mesh_dim).to(keys.dtype))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `mask` as a finite bias, with a huge negative number for -inf."""
    # So that a block whose keys are all masked has a log-sum-exp that vanishes in the merge. With -inf itself kernels
    # return 0 there, or NaN.
    floor = torch.finfo(dtype).min / 2
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, floor)
    return mask.clamp_min(floor).to(dtype)


def _tokens_first(mask: Tensor, batch: int, heads: int) -> Tensor:
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    shape = tuple(mask.shape)
    if mask.ndim != 4 or shape[2] != 1 or shape[1] not in (1, heads) or shape[0] not in (1, batch):
        raise Unsplittable(f"a mask of {shape} differs between queries: only [{batch}, 1, 1, keys] can be split")
    return mask.expand(batch, -1, -1, -1).squeeze(2).permute(2, 0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayout:
    """The sizes and transfers of one attention: computed once a forward, from shapes alone, so the same on all ranks.

    `key_counts` are the key tokens at each ring index. `repeat_keys`: first, so that each query head has its own."""

    queries: LocalTokens
    keys: LocalTokens
    key_counts: tuple[int, ...]
    repeat_keys: bool
    head_chunks: tuple[ring_and_ulysses.HeadChunk, ...]


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
    max_chunks: int = ring_and_ulysses.MAX_HEAD_CHUNKS
    in_order: bool = False

    def __post_init__(self) -> None:
        self._op_id = dispatch.register(self)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Returns the rows of the full attention of this rank's local tokens; tensors are [B, local tokens, H, D].

        Keys and values may have fewer heads, each for a group of neighbouring query heads. `mask` is a key-padding
        mask, see `gather_key_mask`, or a full mask of pairs of tokens. Collective over the context ranks."""
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
        return layout.queries.from_chunks(out, self.mesh.context)

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
        chunks = ring_and_ulysses.head_chunks(self.mesh, query, counts, tokens_by_rank, same_tokens, max_chunks, added)
        return AttentionLayout(
            queries=queries,
            keys=keys,
            key_counts=tuple(sum(of_keys[first : first + ranks]) for first in range(0, len(of_keys), ranks)),
            repeat_keys=repeat,
            head_chunks=chunks,
        )

    def _full_mask(self, mask: Tensor, query: Tensor, layout: AttentionLayout) -> Mask:
        """Returns the mask of all keys; the same mask in the next layer is not gathered again."""
        batch, heads = query.shape[0], query.shape[2]
        # The latest layer's mask (a reference, so that its memory is not reused) and what was made from it.
        kept: list[tuple[Tensor, Mask]] = self.streams.cached((self, "mask", batch, heads), list)
        if not kept or memory_key(kept[0][0]) != memory_key(mask):
            kept[:] = [(mask, self._make_mask(mask, batch, heads, layout))]
        return kept[0][1]

    def _make_mask(self, mask: Tensor, batch: int, heads: int, layout: AttentionLayout) -> Mask:
        """Makes the mask of all keys; of pairs of tokens every rank has the full mask, and takes its queries' rows."""
        streams, queries, keys = self.streams, self.query_streams, self.key_streams
        pairs, total = mask.ndim == 4 and mask.shape[2] > 1, (streams.total(queries), streams.total(keys))
        if not self.streams.has_all_tokens:  # the rows of the current token patch, of keys in the streams' order
            if mask.shape[-1] != total[1] or (pairs and mask.shape[2] != total[0]):
                raise Unsplittable(f"a mask of {list(mask.shape)} is of a patch of {total[1]} keys", "patches")
            if not pairs:
                return _key(_tokens_first(mask, batch, heads))
            return _pair(mask.index_select(-2, streams.global_positions(queries, mask.device)))
        if not pairs:
            local = layout.keys.to_chunks(mask, dim=-1) if mask.shape[-1] == layout.keys.size else mask
            return gather_key_mask(local, batch, heads, streams, keys, self.mesh.context)
        if tuple(mask.shape[-2:]) != total:
            made = f"{mask.shape[-2]} x {mask.shape[-1]}"
            raise Unsplittable(f"a mask of {made} pairs of tokens was made from a part of {total[0]} x {total[1]}")
        first = self.mesh.ring.index * self.mesh.ulysses.size
        rows = streams.global_positions(queries, mask.device, range(first, first + self.mesh.ulysses.size))
        return _pair(mask.index_select(-2, rows).index_select(-1, streams.global_positions(keys, mask.device)))

    def _attend_ulysses(
        self, layout: AttentionLayout, scale: float | None, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Tensor:
        """Exchanges tokens for heads in an all-to-all, attends on the local heads, and exchanges the outputs back."""
        if layout.repeat_keys:
            key, value = dispatch.repeat_kv(key, query.shape[2]), dispatch.repeat_kv(value, query.shape[2])
        float8, dtype = self.parallelism.options.sends_float8, query.dtype
        if float8:
            query, key, value = map(to_float8, (query, key, value))
        mesh_dim, streams, chunks = self.mesh.ulysses, self.streams, layout.head_chunks

        def send(chunk: ring_and_ulysses.HeadChunk) -> list[Pending]:
            tensors = [[query, key, value]] if len(chunk.outbound) == 1 else [[query], [key, value]]
            parts = enumerate(zip(tensors, chunk.outbound, strict=True))
            to_heads = ring_and_ulysses.to_heads
            return [to_heads(some, sent, mesh_dim, streams, (chunk.number, part)) for part, (some, sent) in parts]

        in_flight, returning = send(chunks[0]), list[Pending]()
        for chunk in chunks:
            received: list[Tensor] = []
            for pending, sent in zip(in_flight, chunk.outbound, strict=True):
                received += ring_and_ulysses.split_received(pending.wait()[0], sent)
            in_flight.clear()  # and with it the send buffers
            if chunk.number + 1 < len(chunks):  # the next one travels meanwhile
                in_flight = send(chunks[chunk.number + 1])
            chunk_mask = None if mask is None else mask.heads(chunk.first, *chunk.inbound.heads)
            q, k, v = (from_float8(part, dtype) for part in received) if float8 else received
            out = self._attend_heads(layout, scale, q, k, v, chunk_mask)
            del q, k, v
            received.clear()
            out = to_float8(out) if float8 else out
            returning.append(ring_and_ulysses.to_tokens(out, chunk.inbound, mesh_dim, streams, chunk.number))
        del out, pending
        output = allocate(query.shape, query)
        for chunk, returned in zip(chunks, returning, strict=True):
            ring_and_ulysses.write_returned(returned.wait()[0], chunk.inbound, output)
        return from_float8(output, dtype) if float8 else output

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
        if not self.in_order or not self.streams.has_all_tokens or len(self.query_streams + self.key_streams) == 2:
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

    def _attend_ring(
        self, layout: AttentionLayout, scale: float | None, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Tensor:
        options, key_counts = self.parallelism.options, layout.key_counts
        merge, backend = ring_and_ulysses.Merge(in_float32=options.convert_to_fp32), self._kernel(query, layout, None)
        blocks = ring_and_ulysses.exchange((key, value), key_counts, self.mesh.ring, self.streams, options)
        for owners, (k, v) in blocks:
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
