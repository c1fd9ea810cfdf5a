"""What each rank may do with its own rows alone, if it looks across no cut; else it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import Refused
from .share import Share

FIELDS: dict[str, Callable[..., Tensor]] = {"randn_like": torch.randn, "rand_like": torch.rand}


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
