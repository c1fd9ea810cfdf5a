"""Key-padding masks over cut streams: checked, exchanged in the order of the keys, handed out per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .exchange import gather
from .mesh import Axis
from .sizes import chunk_range


@dataclass(frozen=True, eq=False)
class KeyMask:
    """The mask of all keys of an attention in context order: `keys` [S, B, 1 or heads], bool or additive float."""

    keys: Tensor

    def block(self, start: int, size: int) -> Tensor:
        """Mask [B, 1 or heads, 1, size] of the keys from `start` on, as scaled_dot_product_attention takes it."""
        return self.keys[start : start + size].permute(1, 2, 0).unsqueeze(2).contiguous()

    def heads(self, start: int, size: int) -> KeyMask:
        """The same for some of the heads."""
        return self if self.keys.shape[2] == 1 else KeyMask(self.keys[:, :, start : start + size])

    def dead(self) -> Tensor:
        """[B, 1, 1 or heads, 1]: True where a query has no key at all, in which case its output is zero."""
        alive = self.keys if self.keys.dtype == torch.bool else self.keys > -torch.inf
        return ~alive.any(dim=0)[:, None, :, None]


def exchange_mask(mask: Tensor, batch: int, heads: int, lengths: Sequence[int], axis: Axis) -> KeyMask:
    """The mask of all keys, from each rank's slice of it (or from the whole mask, where it was not cut).

    `mask` is [B, S] bool or int (non-zero: attend), [B, S] additive float, or [B, 1 or heads, 1, S] of either;
    `lengths` are the global lengths of the attention's streams, in the order in which its keys are concatenated.
    Raises ValueError for masks that differ between queries: a rank sees only its own.
    """
    keys = _tokens_first(mask, batch, heads)
    sizes = _sizes(lengths, axis.size)
    if keys.shape[0] not in (sizes[axis.index], sum(lengths)):
        raise ValueError(
            f"the attention mask covers {keys.shape[0]} keys, but this rank holds {sizes[axis.index]} of "
            f"{sum(lengths)}; cut it like the keys in the plan, or leave it whole"
        )
    if keys.shape[0] != sizes[axis.index]:
        keys = _own_slice(keys, lengths, axis)
    wire = keys.to(torch.uint8) if keys.dtype == torch.bool else keys
    (whole,) = gather(wire, sizes, axis).wait()
    return KeyMask(whole.to(keys.dtype))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`mask` as a finite bias. Minus infinity becomes a huge negative number, so that a block whose keys are all
    masked has a log-sum-exp that vanishes in the merge; with -inf itself kernels return 0 there, or NaN."""
    floor = torch.finfo(dtype).min / 2
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, floor)
    return mask.to(dtype).masked_fill(mask == -torch.inf, floor)


def _tokens_first(mask: Tensor, batch: int, heads: int) -> Tensor:
    if mask.dtype not in (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mask = mask != 0
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    shape = tuple(mask.shape)
    if mask.ndim != 4 or shape[2] != 1 or shape[1] not in (1, heads) or shape[0] not in (1, batch):
        raise ValueError(
            f"context parallelism takes key-padding masks, [{batch}, keys] or [{batch}, 1, 1, keys], got {shape}; a "
            "mask that differs between queries cannot be cut: mark the attention as local in the plan, or run it on "
            "one rank"
        )
    return mask.expand(batch, -1, -1, -1).squeeze(2).permute(2, 0, 1)


def _own_slice(keys: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
    parts = keys.split(list(lengths))
    ranges = [chunk_range(length, axis.size, axis.index) for length in lengths]
    return torch.cat([part.narrow(0, *place) for part, place in zip(parts, ranges, strict=True)])


def _sizes(lengths: Sequence[int], parts: int) -> list[int]:
    return [sum(chunk_range(length, parts, index)[1] for length in lengths) for index in range(parts)]
