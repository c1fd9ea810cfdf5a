"""The mode under which torch's functions know that a tensor is some rows of a larger one. No module is hooked, so
convolutions, padding in a forward, caches of time chunks and copied blocks are all the same thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import Refused
from . import local
from .attention import attend
from .convolution import convolution, cudnn_convolution, transposed
from .padding import pad
from .share import Share
from .statistics import group_norm


class Rows(TorchFunctionMode):
    """`tick` is called before each function that is handled here: equally often, in the same places, on every rank."""

    def __init__(self, share: Share, tick: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.share = share
        self._tick = tick
        self._local = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not self._local:
            raise Refused(f"attention of {tuple(args[0].shape)}, which is none of the blocks that can be divided")
        handler = HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        self._tick()
        return handler(self.share, func, *args, **(kwargs or {}))

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """In place of a block's `optimized_attention`."""
        self._tick()
        return attend(self.share, query, key, value)

    def enter_local(self) -> None:
        """What attends from now on looks across no cut."""
        self._local += 1

    def leave_local(self) -> None:
        self._local -= 1


T = Tensor
REDUCTIONS = (
    torch.mean, T.mean, torch.sum, T.sum, torch.var, T.var, torch.std, T.std, torch.var_mean, torch.norm, T.norm,
    torch.amax, T.amax, torch.amin, T.amin, torch.softmax, T.softmax, F.softmax, torch.cumsum, T.cumsum, torch.flip,
    T.flip,
)  # fmt: skip
ACROSS = (
    F.unfold, F.fold, F.grid_sample, F.instance_norm, torch.roll, T.roll, F.max_pool2d, F.max_pool3d,
    F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, torch.fft.fft2, torch.fft.rfft2, torch.fft.fftn,
)  # fmt: skip
HANDLERS: dict[Any, Callable[..., Any]] = {
    F.pad: pad,
    F.conv2d: convolution,
    F.conv3d: convolution,
    torch.cudnn_convolution: cudnn_convolution,
    F.conv_transpose2d: transposed,
    F.conv_transpose3d: transposed,
    F.group_norm: group_norm,
    F.interpolate: local.interpolate,
    F.avg_pool2d: local.pool,
    F.avg_pool3d: local.pool,
    **dict.fromkeys((torch.randn, torch.rand, torch.randn_like, torch.rand_like), local.noise),
    **dict.fromkeys(REDUCTIONS, local.reduce),
    **dict.fromkeys(ACROSS, local.refuse),
}
