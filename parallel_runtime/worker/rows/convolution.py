"""Convolutions: computed whole, with zeros for the neighbours' rows, while these travel; then the rows at an inner edge
again. No activation is copied for its halo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import Refused
from .halo import ask
from .share import Share

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
    pad = padding[share.dim]
    if weight.shape[share.dim] == stride[share.dim] == 1 and pad == 0:
        return run(x, padding=padding)
    if pad == 0:  # what it needs was padded before, or it needs nothing
        y = run(x, padding=padding)
    else:
        reach = (weight.shape[share.dim] - 1) * dilation[share.dim]
        again = stride[share.dim] == 1 and x.shape[share.dim] >= 2 * reach
        y = (_edges_again if again else _joined)(share, run, x, list(padding), reach)
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


def _edges_again(share: Share, run: Run, x: Tensor, padding: list[int], reach: int) -> Tensor:
    dim, rows, pad = share.dim, x.shape[share.dim], padding[share.dim]
    answer = ask(share, x, pad, pad)
    y = run(x, padding=tuple(padding))
    top, bottom = answer()
    padding[dim] = 0
    if top is not None:
        edge = torch.cat([top, x.narrow(dim, 0, reach)], dim)
        y.narrow(dim, 0, pad).copy_(run(edge, padding=tuple(padding)))
    if bottom is not None:
        edge = torch.cat([x.narrow(dim, rows - reach, reach), bottom], dim)
        y.narrow(dim, y.shape[dim] - pad, pad).copy_(run(edge, padding=tuple(padding)))
    return y


def _joined(share: Share, run: Run, x: Tensor, padding: list[int], reach: int) -> Tensor:
    """Where an output row at one edge may need the other edge's halo, or rows are skipped."""
    dim, pad = share.dim, padding[share.dim]
    shape = list(x.shape)
    shape[dim] = pad
    padding[dim] = 0
    top, bottom = (x.new_zeros(shape) if rows is None else rows for rows in ask(share, x, pad, pad)())
    return run(torch.cat([top, x, bottom], dim), padding=tuple(padding))


def _each(size: Size, dims: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * dims if len(sizes) == 1 else sizes
