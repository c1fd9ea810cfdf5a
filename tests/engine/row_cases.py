"""Small networks whose rows are divided over ranks, against themselves whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_runtime.engine.comm.mesh import MeshDim, participating_ranks
from parallel_runtime.engine.rows.conversion import HANDLERS, Conversion
from parallel_runtime.engine.rows.functions import RowFunctions, Share, attend
from parallel_runtime.engine.split.streams import chunk_sizes

Net = Callable[[Tensor], Tensor]
CPU = torch.device("cpu")


def conv(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Net:
    weight = torch.randn(8, 8 // groups, kernel, kernel, generator=torch.Generator().manual_seed(1))
    return lambda x: F.conv2d(x, weight, None, stride, padding, dilation, groups)


def padded(net: Net, *pad: int, mode: str = "constant", value: float | None = None) -> Net:
    return lambda x: net(F.pad(x, pad, mode, value))


def conv3d(x: Tensor) -> Tensor:
    return F.conv3d(F.pad(x.unsqueeze(2).repeat(1, 1, 3, 1, 1), (0, 0, 0, 0, 2, 0)), CUBE, None, 1, (0, 1, 1))


def normed(x: Tensor) -> Tensor:
    return F.group_norm(5 + 3 * x, 4, SCALE, SHIFT, 1e-6)


def upsampled(x: Tensor) -> Tensor:
    return CONV(F.interpolate(x, scale_factor=2.0, mode="nearest"))


DICE = torch.Generator().manual_seed(1)
CUBE, SCALE, SHIFT = (torch.randn(size, generator=DICE) for size in ((8, 8, 3, 3, 3), (8,), (8,)))
CONV = conv(3, padding=1)


NETS: dict[str, Net] = {
    "3": conv(3, padding=1),
    "5": conv(5, padding=2),
    "7, dilated, grouped": conv(3, padding=3, dilation=3, groups=4),
    "1": conv(1),
    "stride 2, padded after": padded(conv(3, stride=2), 0, 1, 0, 1),
    "stride 2, padded around": conv(4, stride=2, padding=1),
    "replicate": padded(conv(3), 1, 1, 1, 1, mode="replicate"),
    "reflect": padded(conv(3), 1, 1, 1, 1, mode="reflect"),
    "a constant": padded(conv(3), 1, 1, 1, 1, value=0.7),
    "two rows before": padded(conv(3), 2, 0, 2, 0),
    "3D, causal": conv3d,
    "group norm": normed,
    "upsampled": upsampled,
    "pooled": lambda x: F.avg_pool2d(F.interpolate(x, scale_factor=2.0), 2),
    "transposed": lambda x: F.conv_transpose2d(x, torch.ones(8, 8, 2, 2), stride=2),
    "noise": lambda x: x + torch.randn_like(x) + torch.randn(x.shape[-2:]),
}


def apart(rank: int, world: int, net: str, dim: int, rows: int, shares: Sequence[int] = ()) -> float:
    """Of this rank's rows from the whole's; 0 where it has none."""
    sizes = (2 * rows, 6) if dim == -2 else (6, 2 * rows)
    x = torch.randn(2, 8, *sizes, generator=torch.Generator().manual_seed(3))
    units = chunk_sizes(rows, tuple(shares) or world)
    ranks = participating_ranks(units, CPU)
    if ranks is None:
        return 0.0
    share = Share(ranks=ranks, dim=dim, units=chunk_sizes(rows, ranks.parts))
    torch.manual_seed(4)
    full = NETS[net](x)
    torch.manual_seed(4)
    with RowFunctions(share, HANDLERS):
        mine = NETS[net](share.split(x).clone())
    wanted = share.split(full)
    assert mine.shape == wanted.shape, f"{tuple(mine.shape)} where {tuple(wanted.shape)} was expected"
    return float((mine - wanted).norm() / wanted.norm())


def attention_apart(rank: int, world: int, rows: int) -> float:
    query, key, value = torch.randn(3, 2, 16, 3, rows, 5, generator=torch.Generator().manual_seed(5))
    share = Share(
        ranks=MeshDim(size=world, index=rank, ranks=tuple(range(world))), dim=-2, units=chunk_sizes(rows, world)
    )

    def heads(x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2).unsqueeze(1)

    full = F.scaled_dot_product_attention(*map(heads, (query, key, value)))[:, 0].transpose(1, 2).reshape(query.shape)
    mine = attend(share, *(share.split(part) for part in (query, key, value)))
    wanted = share.split(full)
    return float((mine - wanted).norm() / wanted.norm())


class Full(nn.Module):
    """Its decode looks across the cut in a way that the mode sees."""

    def decode(self, x: Tensor) -> Tensor:
        return CONV(x)


class Turned(nn.Module):
    """In a way that it does not see."""

    def decode(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., 1:, 1:], x[..., :1, 1:]], -2)


def tried(rank: int, world: int, broken: bool, dim: int) -> float:
    """What the self-test finds."""
    ranks = MeshDim(size=world, index=rank, ranks=tuple(range(world)))
    share = Share(ranks=ranks, dim=dim, units=chunk_sizes(9, world))
    return Conversion((Turned if broken else Full)(), "decode", CPU).self_test(torch.randn(1, 8, 9, 9), share)


def ticks(rank: int, world: int) -> int:
    """How often ranks with unequal rows are asked."""
    asked: list[Any] = []
    share = Share(ranks=MeshDim(size=world, index=rank, ranks=tuple(range(world))), dim=-2, units=chunk_sizes(7, world))
    x = torch.randn(1, 8, 7, 6)
    with RowFunctions(share, HANDLERS, lambda: asked.append(None)):
        for net in ("3", "5", "group norm", "reflect"):
            NETS[net](share.split(x).clone())
    return len(asked)
