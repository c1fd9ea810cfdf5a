"""What torch's functions do on some rows of a larger tensor: with the neighbours' rows, with all ranks' statistics or
keys, alone where they look across no cut, or not at all.

A convolution is computed whole, with zeros for the neighbours' rows, while these travel; then the rows at an inner edge
again. No activation is copied for its halo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Refused
from ..engine.exchange import allocate, gather
from ..engine.kernels import attend_block
from ..engine.merge import Merge
from ..engine.ring import rotate, stops
from .share import Share, ask

FIELDS: dict[str, Callable[..., Tensor]] = {"randn_like": torch.randn, "rand_like": torch.rand}

Size = int | Sequence[int]
Run = Callable[..., Tensor]


def convolution(
    share: Share,
    func: Run,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Any = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """torch.nn.functional.conv2d and conv3d."""
    dims = weight.ndim - 2
    if isinstance(padding, str):
        raise Refused(f"a convolution with padding {padding!r}")
    stride, padding, dilation = (_each(size, dims) for size in (stride, padding, dilation))
    run = partial(func, weight=weight, bias=bias, stride=stride, dilation=dilation, groups=groups)
    rows = padding[share.dim]
    if weight.shape[share.dim] == stride[share.dim] == 1 and rows == 0:
        return run(x, padding=padding)
    if rows == 0:  # what it needs was padded before, or it needs nothing
        y = run(x, padding=padding)
    else:
        reach, apart = (weight.shape[share.dim] - 1) * dilation[share.dim], list(padding)
        apart[share.dim] = 0
        if stride[share.dim] == 1 and x.shape[share.dim] >= 2 * reach and rows <= share.fewest(x):
            y = _edges_again(share, run, x, padding, apart, reach)
        else:  # an output row at one edge may need the other's halo, or one from afar, or rows are skipped
            y = run(pad(share, F.pad, x, [*[0, 0] * (-1 - share.dim), rows, rows]), padding=tuple(apart))
    if y.shape[share.dim] % share.own:
        raise Refused(
            f"a convolution {tuple(weight.shape)} with stride {stride} and padding {padding} of {tuple(x.shape)} "
            f"makes {tuple(y.shape)}"
        )
    return y


def cudnn_convolution(
    share: Share,
    func: Run,
    x: Tensor,
    weight: Tensor,
    padding: Size,
    stride: Size,
    dilation: Size,
    groups: int,
    **rest: Any,
) -> Tensor:
    """torch.cudnn_convolution, which ComfyUI calls for 3D convolutions on some versions of cuDNN."""

    def plain(
        x: Tensor, weight: Tensor, bias: None, stride: Size, padding: Size, dilation: Size, groups: int
    ) -> Tensor:
        return func(x, weight, padding, stride, dilation, groups, **rest)

    return convolution(share, plain, x, weight, None, stride, padding, dilation, groups)


def transposed(
    share: Share,
    func: Run,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """torch.nn.functional.conv_transpose2d and 3d, where no output row comes from two input rows."""
    dims = weight.ndim - 2
    steps, pads, more, dilated = (_each(s, dims)[share.dim] for s in (stride, padding, output_padding, dilation))
    if weight.shape[share.dim] != steps or pads or more or dilated != 1:
        raise Refused(f"a transposed convolution {tuple(weight.shape)} with stride {stride} and padding {padding}")
    return func(x, weight, bias, stride, padding, output_padding, groups, dilation)


def _edges_again(share: Share, run: Run, x: Tensor, padding: Sequence[int], apart: list[int], reach: int) -> Tensor:
    """`apart` is the padding but for that along the cut."""
    dim, rows, pad = share.dim, x.shape[share.dim], padding[share.dim]
    answer = ask(share, x, pad, pad)
    y = run(x, padding=tuple(padding))
    top, bottom = answer()
    if top is not None:
        edge = torch.cat([top, x.narrow(dim, 0, reach)], dim)
        y.narrow(dim, 0, pad).copy_(run(edge, padding=tuple(apart)))
    if bottom is not None:
        edge = torch.cat([x.narrow(dim, rows - reach, reach), bottom], dim)
        y.narrow(dim, y.shape[dim] - pad, pad).copy_(run(edge, padding=tuple(apart)))
    return y


def _each(size: Size, dims: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * dims if len(sizes) == 1 else sizes


def pad(
    share: Share,
    func: Callable[..., Tensor],
    x: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    """torch.nn.functional.pad: along the cut the neighbour's rows; at the outer edges it means what it says."""
    at = 2 * (-1 - share.dim)
    before, after = (pad[at], pad[at + 1]) if len(pad) > at + 1 else (0, 0)
    if before == after == 0:
        return func(x, pad, mode, value)
    if min(before, after) < 0 or mode == "circular":
        raise Refused(f"padding {tuple(pad)} ({mode}) of {tuple(x.shape)} along the cut")
    if max(before, after) + (mode == "reflect") > share.fewest(x):  # some of it is further than the next rank
        factor = share.factor(x, "padding")
        y = func(share.whole(x), pad, mode, value)
        rows = share.own * factor + before + after
        return y.narrow(share.dim, share.before * factor, rows).contiguous()
    answer = ask(share, x, before, after)
    across = [*pad]
    across[at] = across[at + 1] = 0
    y = func(x, pad, mode, value)
    top, bottom = answer()
    if top is not None:
        y.narrow(share.dim, 0, before).copy_(func(top, across, mode, value))
    if bottom is not None:
        y.narrow(share.dim, y.shape[share.dim] - after, after).copy_(func(bottom, across, mode, value))
    return y


def group_norm(
    share: Share,
    func: Callable[..., Tensor],
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.group_norm with the statistics of all ranks, in float32 whatever the activations are in."""
    if x.ndim > 3:  # else rows and columns are one dim, in proportion to this rank's rows
        share.factor(x, "a group norm")
    batch, channels = x.shape[:2]
    mean, variance = _of_all(share, *_moments(x.reshape(batch, num_groups, -1)))
    spread = (batch, num_groups, channels // num_groups)
    mean, variance = (value.unsqueeze(2).expand(spread).reshape(-1) for value in (mean, variance))
    weight, bias = (None if value is None else value.to(mean.dtype).repeat(batch) for value in (weight, bias))
    rows = x.reshape(1, batch * channels, -1)
    # One fused kernel, which computes in float32: a batch norm whose channels are all items' channels.
    return F.batch_norm(rows, mean, variance, weight, bias, False, 0.0, eps).view(x.shape)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the last dim, without a copy of `x` in float32."""
    if x.dtype in (torch.float32, torch.float64):
        variance, mean = torch.var_mean(x, 2, correction=0)
        return mean, variance
    mean = x.sum(2, dtype=torch.float32) / x.shape[2]
    squares = torch.linalg.vector_norm(x, 2, 2, dtype=torch.float32).square() / x.shape[2]
    return mean, (squares - mean.square()).clamp_(min=0)


def _of_all(share: Share, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Chan's combination: the mean of the variances, and the variance of the means."""
    mine = torch.stack([mean, variance])[None]
    (everybodys,) = gather(mine, [1] * share.ranks.size, share.ranks).wait()
    means, variances = everybodys.unbind(1)
    weights = share.weights(mean.device).to(mean.dtype)
    mean = torch.tensordot(weights, means, 1)
    return mean, torch.tensordot(weights, variances + (means - mean).square(), 1)


def attend(share: Share, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One head over all pixels: [B, C, (T,) rows, columns] of this rank each, and so is the result. Collective.

    Keys and values go round in a ring. No rank ever holds all of them, which in a large video would set the peak, and
    no kernel depends on free memory.
    """
    tokens = key.flatten(2).shape[2]
    sizes = [tokens // share.own * units for units in share.units]
    share.factor(query, "attention")
    merge = Merge(in_float32=True)
    asking, block = _batch_first(query), (_batch_first(key), _batch_first(value))
    places = stops(block, sizes, share.ranks, lambda shape, _: allocate(shape, query))
    for _, (keys, values) in rotate(block, places, share.ranks):
        merge.add(*attend_block(asking, keys, values, None, None, "auto"))
    return merge.result(asking, None)[:, :, 0].transpose(1, 2).reshape(query.shape)


def _batch_first(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2).unsqueeze(2).contiguous()


def interpolate(
    share: Share,
    func: Callable[..., Tensor],
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    y = func(x, size, scale_factor, mode, *args, **kwargs)
    rows, made = x.shape[share.dim], y.shape[share.dim]
    if (not mode.startswith("nearest") and rows != made) or (rows % made and made % rows) or made % share.own:
        raise Refused(f"interpolation ({mode}) of {tuple(x.shape)} to {tuple(y.shape)}")
    return y


def pool(
    share: Share,
    func: Callable[..., Tensor],
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    wide, step, pad = (v if isinstance(v, int) else v[share.dim] for v in (kernel_size, stride or kernel_size, padding))
    y = func(x, kernel_size, stride, padding, *args, **kwargs)
    if wide != step or pad or y.shape[share.dim] % share.own:
        raise Refused(f"pooling {kernel_size} with stride {stride} of {tuple(x.shape)}")
    return y


def noise(share: Share, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Drawn whole on every rank, from the same state of the generator, and cut."""
    like = isinstance(args[0], Tensor)
    flat = not like and isinstance(args[0], int)
    shape = [*(args if flat else args[0].shape if like else args[0])]
    if len(shape) < 2 or shape[share.dim] % share.own:
        raise Refused(f"{func.__name__} of {tuple(shape)}")
    factor = shape[share.dim] // share.own
    shape[share.dim] = sum(share.units) * factor
    if like:
        kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        kwargs.pop("memory_format", None)
    return share.cut(FIELDS.get(func.__name__, func)(shape, **kwargs), factor)


def reduce(share: Share, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    given = next((arg for arg in args if isinstance(arg, int | tuple | list) and not isinstance(arg, bool)), None)
    dim = kwargs.get("dim", given)
    dims = [dim] if isinstance(dim, int) else dim
    if x.ndim >= 4 and (dims is None or any(each % x.ndim == x.ndim + share.dim for each in dims)):
        raise Refused(f"{func.__name__} over dim {dim} of {tuple(x.shape)}")
    return func(x, *args, **kwargs)


def refuse(share: Share, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shape = next((tuple(arg.shape) for arg in args if isinstance(arg, Tensor)), ())
    raise Refused(f"{func.__name__} of {shape}")
