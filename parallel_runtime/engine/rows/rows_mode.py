"""Runs a model on this rank's rows: in a mode in which torch's functions treat a tensor as some rows of a larger one.
No convolution is hooked, so padding in a forward, caches of time chunks and copied blocks are handled alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import Refused
from . import functions
from .row_share import Share

Handlers = dict[Any, Callable[..., Any]]  # called with a Share, the function and its arguments
ATTENTION = {"optimized_attention", "optimized_vae_attention"}  # what ComfyUI's VAE blocks call, attributes of theirs


@contextmanager
def running_on_rows(model: nn.Module, rows: Rows, over_time: Collection[str] = ()) -> Iterator[None]:
    """In this context `model` runs on this rank's rows. Modules of the classes `over_time` ("module.Class") attend
    along time only, each pixel for itself, and are left as they are."""
    with ExitStack() as stack:
        for module in model.modules():
            if f"{type(module).__module__}.{type(module).__name__}" in over_time:
                stack.enter_context(module.register_forward_pre_hook(partial(rows.local, 1)))
                stack.enter_context(module.register_forward_hook(partial(rows.local, -1), always_call=True))
            for name in vars(module).keys() & ATTENTION:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, rows.attention)
        stack.enter_context(rows)
        yield


class RowFunctions(TorchFunctionMode):
    """Functions with one of `handlers` treat a tensor as this rank's rows of a larger one in this mode. `tick` is
    called before each of them: equally often, in the same places, on every rank."""

    def __init__(self, share: Share, handlers: Handlers, tick: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._share = share
        self._handlers = handlers
        self._tick = tick

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        self._tick()
        return handler(self._share, func, *args, **(kwargs or {}))


class Rows(RowFunctions):
    """The mode for a model whose attentions are refused where they are not handled and may see other rows."""

    def __init__(self, share: Share, tick: Callable[[], None] = lambda: None) -> None:
        super().__init__(share, HANDLERS, tick)
        self._local = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not self._local:
            raise Refused("rows.attention", shape=str(tuple(args[0].shape)))
        return super().__torch_function__(func, types, args, kwargs)

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Replaces a block's `optimized_attention`."""
        self._tick()
        return functions.attend(self._share, query, key, value)

    def local(self, change: int, *_: Any) -> None:
        """Counts modules in progress whose attention reads no other rank's rows (`change` is 1 or -1)."""
        self._local += change


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
HANDLERS: Handlers = {
    F.pad: functions.pad,
    F.conv2d: functions.convolution,
    F.conv3d: functions.convolution,
    torch.cudnn_convolution: functions.cudnn_convolution,
    F.conv_transpose2d: functions.transposed,
    F.conv_transpose3d: functions.transposed,
    F.group_norm: functions.group_norm,
    F.interpolate: functions.interpolate,
    F.avg_pool2d: functions.pool,
    F.avg_pool3d: functions.pool,
    **dict.fromkeys((torch.randn, torch.rand, torch.randn_like, torch.rand_like), functions.noise),
    **dict.fromkeys(REDUCTIONS, functions.reduce),
    **dict.fromkeys(ACROSS, functions.refuse),
}
