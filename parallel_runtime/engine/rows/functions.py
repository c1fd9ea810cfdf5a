"""torch's functions on this rank's rows of a larger tensor: with the neighbours' rows, with all ranks' statistics or
keys, on these rows only where no other matters, or refused."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsplittable
from ..attention.dispatch import attend_block
from ..attention.ring_and_ulysses import Merge, rotate
from ..comm.collectives import all_gather_v, allocate, send_recv
from .levels import Share, fetch_neighbour_rows

PIECE_ELEMENTS = 2**22  # 16 MiB in float32, which stay in a GPU's cache
WIDE = (torch.float32, torch.float64)

Size = int | Sequence[int]
Given = Tensor | None  # None where a function is called without it
Function = Callable[..., Tensor]
FIELDS: dict[str, Function] = {"randn_like": torch.randn, "rand_like": torch.rand}


def convolution(
    share: Share, func: Function, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1,
    padding: Any = 0, dilation: Size = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Computes torch.nn.functional.conv2d or conv3d."""
    dims = weight.ndim - 2
    if isinstance(padding, str):
        raise Unsplittable(f"a convolution with padding {padding!r}")
    stride, padding, dilation = (_per_dim(size, dims) for size in (stride, padding, dilation))
    run = partial(func, weight=weight, bias=bias, stride=stride, dilation=dilation, groups=groups)
    rows = padding[share.dim]
    if weight.shape[share.dim] == stride[share.dim] == 1 and rows == 0:
        return run(x, padding=padding)
    if rows == 0:  # what it needs was padded before, or it needs nothing
        y = run(x, padding=padding)
    else:
        reach, across = (weight.shape[share.dim] - 1) * dilation[share.dim], list(padding)
        across[share.dim] = 0
        if stride[share.dim] == 1 and x.shape[share.dim] >= 2 * reach and rows <= min(share.rows_of(x, "padding")):
            y = _convolve_edges(share, run, x, padding, across, reach)
        else:  # an output row at one edge may need the other's halo, or one from afar, or rows are skipped
            y = run(pad(share, F.pad, x, [*[0, 0] * (-1 - share.dim), rows, rows]), padding=tuple(across))
    return _check_level(share, y, x, weight, stride, padding)


def convolution_with_edges(
    share: Share, func: Function, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Size, padding: Any, *more: Any
) -> Tensor:
    """Computes conv2d or conv3d of rows with one more row at each side, which serves as padding."""
    remaining_padding = list(_per_dim(padding, weight.ndim - 2))
    remaining_padding[share.dim] = max(0, remaining_padding[share.dim] - 1)
    y = func(x, weight, bias, stride, tuple(remaining_padding), *more)
    return _check_level(share, y, x, weight, stride, padding)


def _check_level(share: Share, y: Tensor, x: Tensor, weight: Tensor, stride: Size, padding: Any) -> Tensor:
    """Returns `y`, the convolution of `x`. Raises Refused where it is not the rows of a level."""
    if not share.is_level(y):
        detail = f"a convolution {tuple(weight.shape)} with stride {stride} and padding {padding}"
        raise Unsplittable(f"{detail} of {tuple(x.shape)} makes {tuple(y.shape)}")
    return y


def cudnn_convolution(
    share: Share, func: Function, x: Tensor, weight: Tensor, padding: Size, stride: Size, dilation: Size, groups: int,
    **flags: Any,
) -> Tensor:  # fmt: skip
    """Computes torch.cudnn_convolution, which ComfyUI calls for 3D convolutions on some versions of cuDNN."""

    def plain(
        x: Tensor, weight: Tensor, bias: None, stride: Size, padding: Size, dilation: Size, groups: int
    ) -> Tensor:
        return func(x, weight, padding, stride, dilation, groups, **flags)

    return convolution(share, plain, x, weight, None, stride, padding, dilation, groups)


def transposed(
    share: Share, func: Function, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1,
    padding: Size = 0, output_padding: Size = 0, groups: int = 1, dilation: Size = 1,
) -> Tensor:  # fmt: skip
    """Computes torch.nn.functional.conv_transpose2d or 3d, where no output row comes from two input rows."""
    dims = weight.ndim - 2
    steps, pads, more, dilated = (_per_dim(s, dims)[share.dim] for s in (stride, padding, output_padding, dilation))
    if weight.shape[share.dim] != steps or pads or more or dilated != 1:
        raise Unsplittable(f"a transposed convolution {tuple(weight.shape)} with stride {stride} and padding {padding}")
    return func(x, weight, bias, stride, padding, output_padding, groups, dilation)


def _convolve_edges(
    share: Share, run: Function, x: Tensor, padding: Sequence[int], across: list[int], reach: int
) -> Tensor:
    """Convolves, and computes the rows at inner edges again. `across` is `padding` without that along the split dim."""
    dim, rows, pad = share.dim, x.shape[share.dim], padding[share.dim]
    neighbour_rows = fetch_neighbour_rows(share, x, pad, pad)
    # With zeros for the neighbours' rows while these travel: so no activation is copied for its halo.
    y = run(x, padding=tuple(padding))
    top, bottom = neighbour_rows()
    if top is not None:
        edge = torch.cat([top, x.narrow(dim, 0, reach)], dim)
        y.narrow(dim, 0, pad).copy_(run(edge, padding=tuple(across)))
    if bottom is not None:
        edge = torch.cat([x.narrow(dim, rows - reach, reach), bottom], dim)
        y.narrow(dim, y.shape[dim] - pad, pad).copy_(run(edge, padding=tuple(across)))
    return y


def _per_dim(size: Size, dims: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * dims if len(sizes) == 1 else sizes


def pad(
    share: Share, func: Function, x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """Computes torch.nn.functional.pad: along the split dim the neighbour's rows; at the outer edges as given."""
    at = 2 * (-1 - share.dim)
    before, after = (pad[at], pad[at + 1]) if len(pad) > at + 1 else (0, 0)
    if before == after == 0:
        return func(x, pad, mode, value)
    if min(before, after) < 0 or mode == "circular":
        raise Unsplittable(f"padding {tuple(pad)} ({mode}) of {tuple(x.shape)} along the split dim")
    rows = share.rows_of(x, "padding")
    if max(before, after) + (mode == "reflect") > min(rows):  # some rows are further than the next rank
        y = func(share.gather(x), pad, mode, value)
        return y.narrow(share.dim, sum(rows[: share.index]), rows[share.index] + before + after).contiguous()
    neighbour_rows = fetch_neighbour_rows(share, x, before, after)
    across = [*pad]
    across[at] = across[at + 1] = 0
    y = func(x, pad, mode, value)
    top, bottom = neighbour_rows()
    if top is not None:
        y.narrow(share.dim, 0, before).copy_(func(top, across, mode, value))
    if bottom is not None:
        y.narrow(share.dim, y.shape[share.dim] - after, after).copy_(func(bottom, across, mode, value))
    return y


def group_norm(
    share: Share, func: Function, x: Tensor, num_groups: int, weight: Given = None, bias: Given = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Computes torch.nn.functional.group_norm with the statistics of all ranks, in float32 whatever `x` is in."""
    weights = share.weights(x)
    local = _moments(x, num_groups)
    (moments,) = all_gather_v(local[None], [1] * share.ranks.size, share.ranks).wait()
    return _normalize(x, _combined_moments(weights, moments), weight, bias, eps)


def group_norm_with_edges(
    share: Share, func: Function, x: Tensor, num_groups: int, weight: Given = None, bias: Given = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Computes group_norm with one more row at each side for the convolution that follows: the neighbours', or a copy
    of this rank's at an outer edge. They travel with the statistics, in one message."""
    weights, dim, local = share.weights(x), share.dim, _moments(x, num_groups)
    first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
    index, peers = share.index, share.ranks.other_ranks
    edges, packed = {index - 1: first, index + 1: last}, local.flatten().view(x.dtype)
    send = {peer: torch.cat([packed, edges[peer].flatten()]) if peer in edges else packed for peer in peers}
    received = send_recv(send, {peer: allocate(part.shape, x) for peer, part in send.items()}, share.ranks).wait()
    by_rank = {index: packed} | dict(zip(peers, received, strict=True))
    moments = [by_rank[rank][: len(packed)].view(local.dtype).view(local.shape) for rank in range(share.ranks.size)]
    by_edge = {peer: by_rank[peer][len(packed) :].view(edge.shape) for peer, edge in edges.items() if peer in by_rank}
    before, after = (edges | by_edge).values()
    combined = _combined_moments(weights, torch.stack(moments))
    return _normalize(torch.cat([before, x, after], dim), combined, weight, bias, eps)


def _normalize(x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalizes in one fused kernel, in float32: a batch norm whose channels are all items' channels."""
    batch, channels = x.shape[:2]
    by_group = (2, batch, moments.shape[2], channels // moments.shape[2])
    mean, variance = moments.unsqueeze(3).expand(by_group).reshape(2, -1)
    weight, bias = (None if value is None else value.to(mean.dtype).repeat(batch) for value in (weight, bias))
    rows = x.reshape(1, batch * channels, -1)
    return F.batch_norm(rows, mean, variance, weight, bias, False, 0.0, eps).view(x.shape)


def _moments(x: Tensor, num_groups: int) -> Tensor:
    """Returns [2, batch, groups]: mean and variance, in float32 at least."""
    if x.device.type == "cpu" and x.dtype in WIDE:  # where torch's var_mean takes ten times as long
        x = x.reshape(x.shape[0], num_groups, -1)
        mean = x.mean(2)
        return torch.stack([mean, (x - mean.unsqueeze(2)).square_().mean(2)])
    x = x.reshape(x.shape[0], num_groups, -1, x.shape[-1])
    if x.dtype in WIDE:
        variance, mean = torch.var_mean(x, (2, 3), correction=0)
        return torch.stack([mean, variance])
    # In pieces of whole rows: a copy of all of it in float32 would be twice its size.
    rows = x.reshape(-1, x.shape[3])
    pieces = rows.split(max(1, PIECE_ELEMENTS // x.shape[3]))
    of_each = [torch.stack(torch.var_mean(piece.float(), 1, correction=0)) for piece in pieces]
    variances, means = torch.cat(of_each, 1).view(2, *x.shape[:3])
    variance, mean = torch.var_mean(means, 2, correction=0)
    return torch.stack([mean, variance + variances.mean(2)])


def _combined_moments(weights: Tensor, moments: Tensor) -> Tensor:
    """Combines [ranks, 2, batch, groups] into [2, batch, groups]: mean of variances, variance of means (Chan)."""
    means, variances = moments.unbind(1)
    weights = weights.to(means.dtype)
    mean = torch.tensordot(weights, means, 1)
    return torch.stack([mean, torch.tensordot(weights, variances + (means - mean).square(), 1)])


def norm(
    share: Share, func: Function, x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor:
    """Computes torch.norm of each channel over all rows and columns of [batch, rows, columns, channels], in float32."""
    if p not in (2, 2.0) or tuple(dim or ()) != (1, 2) or not keepdim or any(options.values()):
        raise Unsplittable(f"norm over dim {dim} of {tuple(x.shape)}")
    local = func(x, 2, dim, True, dtype=x.dtype if x.dtype in WIDE else torch.float32)
    (all_ranks,) = all_gather_v(local[None], [1] * share.ranks.size, share.ranks).wait()
    return all_ranks.square().sum(0).sqrt().to(x.dtype)


def attend(share: Share, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends with one head over all pixels; takes and returns [B, C, (T,) rows, columns] of this rank. Collective."""
    # In a ring no rank ever has all keys and values, which in a large video would set the peak memory.
    rows = share.rows_of(query, "attention")
    sizes = [key[0, 0].numel() // rows[share.index] * rows_of_rank for rows_of_rank in rows]
    merge = Merge(in_float32=True)
    queries, block = _one_head(query), (_one_head(key), _one_head(value))
    for _, (keys, values) in rotate(block, sizes, share.ranks):
        merge.add(*attend_block(queries, keys, values, None, None, "native"))
    return merge.result(queries, None)[:, :, 0].transpose(1, 2).reshape(query.shape)


def _one_head(x: Tensor) -> Tensor:
    """Reshapes [B, C, ...] to [B, tokens, 1, C]."""
    return x.flatten(2).transpose(1, 2).unsqueeze(2).contiguous()


def interpolate(
    share: Share, func: Function, x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    y = func(x, size, scale_factor, mode, *args, **kwargs)
    before, after = x.shape[share.dim], y.shape[share.dim]
    smooth, uneven = not mode.startswith("nearest"), before % after and after % before
    if (smooth and before != after) or uneven or not share.is_level(y):
        raise Unsplittable(f"interpolation ({mode}) of {tuple(x.shape)} to {tuple(y.shape)}")
    return y


def pool(
    share: Share, func: Function, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    sizes = (kernel_size, stride or kernel_size, padding)
    width, step, pad = (size if isinstance(size, int) else size[share.dim] for size in sizes)
    y = func(x, kernel_size, stride, padding, *args, **kwargs)
    if width != step or pad or not share.is_level(y):
        raise Unsplittable(f"pooling {kernel_size} with stride {stride} of {tuple(x.shape)}")
    return y


def noise(share: Share, func: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Draws the full noise on every rank, from the same state of the generator, and returns this rank's rows of it."""
    like = isinstance(args[0], Tensor)
    flat = not like and isinstance(args[0], int)
    shape = [*(args if flat else args[0].shape if like else args[0])]
    if len(shape) < 2 or shape[share.dim] % share.local_units:
        raise Unsplittable(f"{func.__name__} of {tuple(shape)}")
    shape[share.dim] = shape[share.dim] // share.local_units * sum(share.units)
    if like:
        kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        kwargs.pop("memory_format", None)
    return share.split(FIELDS.get(func.__name__, func)(shape, **kwargs))


def reduce(share: Share, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    positional = next((arg for arg in args if isinstance(arg, int | tuple | list) and not isinstance(arg, bool)), None)
    dim = kwargs.get("dim", positional)
    dims = [dim] if isinstance(dim, int) else dim
    if x.ndim >= 4 and (dims is None or any(each % x.ndim == x.ndim + share.dim for each in dims)):
        raise Unsplittable(f"{func.__name__} over dim {dim} of {tuple(x.shape)}")
    return func(x, *args, **kwargs)


def refuse_attention(share: Share, func: Function, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Refuses attention over this rank's rows alone."""
    raise Unsplittable(f"attention of {tuple(query.shape)}, which belongs to no block that can be divided")


def refuse(share: Share, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shape = next((tuple(arg.shape) for arg in args if isinstance(arg, Tensor)), ())
    raise Unsplittable(f"{func.__name__} of {shape}")
