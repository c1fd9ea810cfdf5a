"""One attention over cut streams, exact for every combination of ring and Ulysses degree. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...specs import AttentionBackend, Parallelism
from .exchange import allocate
from .kernels import attend, attend_block, for_heads
from .masks import KeyMask, exchange_mask
from .merge import Merge
from .mesh import ContextMesh
from .ring import visit
from .sizes import chunk_range
from .standins import drop, held_sizes, restore
from .streams import Streams
from .ulysses import start_to_heads, to_tokens


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """Attention of the ranks of a context mesh over `names`, the streams that its queries and keys concatenate."""

    mesh: ContextMesh
    parallelism: Parallelism
    streams: Streams
    names: tuple[str, ...]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Each rank passes its own tokens [B, own tokens, H, D] and gets its own rows of the whole attention.

        Keys and values may have fewer heads, each for a group of neighbouring query heads. `mask` is a key-padding
        mask, see `exchange_mask`. Collective over the context ranks.
        """
        own = self.streams.own(self.names, self.mesh.context.index)
        lengths = [self.streams.length(name) for name in self.names]
        held = held_sizes(own, lengths)
        self._check(query, key, sum(held))
        if sum(held) == sum(own):
            return self._attend(query, key, value, mask, lengths, scale)
        if mask is not None and mask.shape[-1] == sum(held):
            mask = drop(mask, own, held, dim=-1)
        query, key, value = (drop(tensor, own, held) for tensor in (query, key, value))
        return restore(self._attend(query, key, value, mask, lengths, scale), own, held)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: list[int], scale: float | None
    ) -> Tensor:
        spread = self.streams.spread(self.names)
        keys = None
        if mask is not None:
            keys = exchange_mask(mask, query.shape[0], query.shape[2], lengths, self.mesh.context)
        if self.mesh.ulysses.size == 1:
            return self._ring(query, _tokens_first(key), _tokens_first(value), spread, keys, scale)
        return self._ulysses(query, key, value, spread, keys, scale)

    def _ulysses(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spread: tuple[int, ...],
        keys: KeyMask | None,
        scale: float | None,
    ) -> Tensor:
        axis, ring = self.mesh.ulysses, self.mesh.ring
        tokens = spread[ring.index * axis.size : (ring.index + 1) * axis.size]
        heads = query.shape[2]
        if key.shape[2] % axis.size:  # a rank's query heads may need a part of a group
            key, value = for_heads(key, heads), for_heads(value, heads)
        coming = [start_to_heads(tensor, tokens, axis) for tensor in (query, key, value)]
        if keys is not None:
            keys = keys.heads(*chunk_range(heads, axis.size, axis.index))
        q, k, v = (pending.wait() for pending in coming)
        del coming  # and with it the send buffers
        if ring.size == 1:
            mask = None if keys is None else keys.block(0, sum(spread))
            out = self._whole(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scale)
        else:
            blocks = tuple(sum(spread[start : start + axis.size]) for start in range(0, len(spread), axis.size))
            out = self._ring(q.transpose(0, 1), k, v, blocks, keys, scale)
        del q, k, v
        return to_tokens(out.transpose(0, 1), heads, tokens, axis)

    def _ring(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: tuple[int, ...],
        keys: KeyMask | None,
        scale: float | None,
    ) -> Tensor:
        """`query` [B, Sq, H, D] against the blocks of the ring; this rank's are `key`, `value` [Sk, B, H, D]."""
        merge = Merge(in_float32=self.parallelism.convert_to_fp32)
        for owner, (k, v) in visit((key, value), blocks, self.mesh.ring, self.parallelism.rotate_method):
            if query.numel() == 0 or k.numel() == 0:
                continue
            mask = None if keys is None else keys.block(sum(blocks[:owner]), blocks[owner])
            if mask is not None and _hides_all(mask):
                continue
            merge.add(*attend_block(query, k.transpose(0, 1), v.transpose(0, 1), mask, scale, self._backend))
        return merge.result(query, None if keys is None else keys.dead())

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        if query.numel() == 0:
            return allocate(query.shape, query)
        return attend(query, key, value, mask, scale, self._backend)

    def _check(self, query: Tensor, key: Tensor, held: int) -> None:
        if query.shape[1] != held or key.shape[1] != held:
            raise ValueError(
                f"attention over streams {self.names} expects {held} tokens on this rank, got {query.shape[1]} queries "
                f"and {key.shape[1]} keys; name its streams in the plan, or mark it local if its keys are whole"
            )
        if query.shape[2] % key.shape[2]:
            raise ValueError(f"{query.shape[2]} query heads cannot be grouped under {key.shape[2]} key heads")
        if torch.is_grad_enabled() and query.requires_grad:
            raise ValueError("context parallelism here is for inference; wrap the call in torch.no_grad()")

    @property
    def _backend(self) -> AttentionBackend:
        return self.parallelism.attention_backend


def _tokens_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous()


def _hides_all(mask: Tensor) -> bool:
    """Worth a look only where it costs no wait for the device: blocks that are hidden anyway merge to nothing."""
    return mask.device.type == "cpu" and mask.dtype == torch.bool and not bool(mask.any())
