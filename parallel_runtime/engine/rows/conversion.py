"""One decode or encode of a VAE on this rank's rows, from a full tensor into shared memory for the full result; and the
self-test before the first of a class.

The model runs in a mode in which torch's functions treat a tensor as some rows of a larger one. No convolution is
hooked, so padding in a forward, caches of time chunks and copied blocks are handled alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import Refused
from ...specs import VAEMethod
from ..comm.mesh import MeshDim
from ..split.streams import chunk_sizes
from . import functions
from .row_share import Handlers, RowFunctions, Share

ATTENTION = {"optimized_attention", "optimized_vae_attention"}  # what ComfyUI's VAE blocks call, attributes of theirs
CHUNKED = "comfy_has_chunked_io"  # ComfyUI's attribute: the VAE moves its input, and writes its output, chunk by chunk
PIECE_BYTES = 64 << 20
TRIAL_COLUMNS = 4  # of the latent, with two rows a rank
TRIAL_FRAMES = {"decode": 3, "encode": 13}


def share_of(x: Tensor, unit: int, ranks: MeshDim) -> Share:
    """Returns the split of `x` along its longer side, where fewer bytes travel and the shares of rows are more even;
    `unit` rows of x make one of the latent. Raises Refused where they do not come out even."""
    dim = -2 if x.shape[-2] >= x.shape[-1] else -1
    units, left = divmod(x.shape[dim], unit)
    if left:
        raise Refused("rows.multiple", pixels=x.shape[dim], unit=unit)
    return Share(ranks=ranks, dim=dim, units=chunk_sizes(units, ranks.parts))


@dataclass(frozen=True)
class Conversion:
    """`model.decode` or `model.encode` over ranks that compute on `device`; `unit` rows of its input make one of the
    latent. Modules of the classes `over_time` attend along time only. `chunks(own, total)` is called before a run of so
    many of the rows."""

    model: nn.Module
    method: VAEMethod
    device: torch.device
    unit: int = 1
    over_time: Collection[str] = ()
    chunks: Callable[[int, int], None] = lambda own, total: None

    def run(
        self, x: Tensor, share: Share, *, place: Tensor | None = None, tick: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Returns this rank's rows of the output for the full `x`, in `place` where there is one. Collective."""
        self.chunks(share.local_units, sum(share.units))
        local, options = share.split(x, self.unit), dict[str, Any]()
        if getattr(self.model, CHUNKED, False):
            if self.method == "encode":
                options["device"] = self.device
            elif place is not None:
                options["output_buffer"] = place
        if "device" not in options:
            local = local.to(self.device)
        if share.ranks.size == 1:
            output = getattr(self.model, self.method)(local, **options)
        else:
            with _running_on_rows(self.model, RowsMode(share, tick), self.over_time):
                output = getattr(self.model, self.method)(local.contiguous(), **options)
        if place is not None and output is not place:
            _copy_out(output, place)
        return output

    def self_test(self, x: Tensor, ranks: MeshDim, dim: int) -> float:
        """Tests a VAE's class by a small latent on all ranks against the same one on this rank alone.
        Collective.

        Finds what the mode cannot see of functions that read other rows (indexing, concatenation, products along rows).
        Returns the relative L2 distance of this rank's rows, for an input like `x`; NaN where they are not finite.
        """
        total = 2 * ranks.size
        share = Share(ranks=ranks, dim=dim, units=(2,) * ranks.size)
        alone = Share(ranks=MeshDim(), dim=dim, units=(total,))
        small = _trial_input(x, self.method, total * self.unit, TRIAL_COLUMNS * self.unit, dim)
        runs = []
        for part in (alone, share):
            torch.manual_seed(2)
            runs.append(self.run(small, part).float())
        full, local = runs
        expected = share.split(full, full.shape[dim] // total)
        if expected.shape != local.shape:
            return float("inf")
        return float((local - expected).norm() / expected.norm().clamp_min(1e-12))


def _copy_out(output: Tensor, place: Tensor) -> None:
    """Copies to main memory in the same dtype, and widens it there, a piece at a time: a wide copy would fill the
    device."""
    if output.ndim == 4 and place.ndim == 5:  # of one frame, without the dim of time
        output = output.unsqueeze(2)
    if output.shape != place.shape:
        raise Refused("rows.shape", shape=str(tuple(output.shape)), expected=str(tuple(place.shape)))
    dim = 2 if output.ndim == 5 else 0
    step = max(1, output.shape[dim] * PIECE_BYTES // max(1, output.numel() * output.element_size()))
    for piece, target in zip(output.split(step, dim), place.split(step, dim), strict=True):
        target.copy_(piece.to(place.device))


def error_limit(dtype: torch.dtype) -> float:
    """Returns the largest distance that a self-test allows: rounding alone comes to 2e-2 in bfloat16."""
    return 1e-3 if dtype in functions.WIDE else 5e-2


def _trial_input(x: Tensor, method: VAEMethod, along: int, across: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[0] = min(2, shape[0])
    if x.ndim == 5:
        shape[2] = min(TRIAL_FRAMES[method], shape[2])
    shape[-2:] = (along, across) if dim == -2 else (across, along)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)


@contextmanager
def _running_on_rows(model: nn.Module, rows: RowsMode, over_time: Collection[str] = ()) -> Iterator[None]:
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


class RowsMode(RowFunctions):
    """The mode of a VAE. It refuses attention over this rank's rows alone, except in modules that attend along time."""

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
