"""One decode or encode of a VAE on this rank's rows, from a full tensor into shared memory for the full result; and the
self-test before the first of a class.

The model runs in a mode in which torch's functions treat a tensor as some rows of a larger one. No convolution is
hooked, so padding in a forward, caches of time chunks and copied blocks are handled alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import Unsplittable
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
        raise Unsplittable(f"{x.shape[dim]} pixels are not a multiple of the {unit} that make a row of the latent")
    return Share(ranks=ranks, dim=dim, units=chunk_sizes(units, ranks.parts))


@dataclass(frozen=True)
class Conversion:
    """`model.decode` or `model.encode` over ranks that compute on `device`. `on_rows(own, total)` is the context of a
    run on so many of the rows."""

    model: nn.Module
    method: VAEMethod
    device: torch.device
    on_rows: Callable[[int, int], AbstractContextManager[None]] = lambda own, total: nullcontext()

    def run(
        self, x: Tensor, share: Share, *, place: Tensor | None = None, tick: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Returns this rank's rows of the output for the full `x`, in `place` where there is one. Collective."""
        local, options = share.split(x), dict[str, Any]()
        if getattr(self.model, CHUNKED, False):
            if self.method == "encode":
                options["device"] = self.device
            elif place is not None:
                options["output_buffer"] = place
        if "device" not in options:
            local = local.to(self.device)
        divided = nullcontext() if share.ranks.size == 1 else _dividing(self.model, share, tick)
        with self.on_rows(share.local_units, sum(share.units)), divided:
            output = getattr(self.model, self.method)(local.contiguous(), **options)
        if place is not None and output is not place:
            _copy_out(output, place)
        return output

    def self_test(self, x: Tensor, full_share: Share) -> float:
        """Tests a VAE's class by a small input on the ranks of `full_share`, the share of `x`, against the same one on
        this rank only. Collective.

        Finds what the mode cannot see of functions that read other rows (indexing, concatenation, products along rows).
        Returns the relative L2 distance of this rank's rows, for an input like `x`; NaN where they are not finite.
        """
        ranks, dim, unit = full_share.ranks, full_share.dim, x.shape[full_share.dim] // sum(full_share.units)
        total = 2 * ranks.size
        share = Share(ranks=ranks, dim=dim, units=(2,) * ranks.size)
        single_rank = Share(ranks=MeshDim(), dim=dim, units=(total,))
        small = _trial_input(x, self.method, total * unit, TRIAL_COLUMNS * unit, dim)
        runs = []
        for part in (single_rank, share):
            torch.manual_seed(2)
            runs.append(self.run(small, part).float())
        full, local = runs
        expected = share.split(full)
        if expected.shape != local.shape:
            return float("inf")
        return float((local - expected).norm() / expected.norm().clamp_min(1e-12))


def _copy_out(output: Tensor, place: Tensor) -> None:
    """Copies to main memory in the same dtype, and widens it there, a piece at a time: a wide copy would fill the
    device."""
    if output.ndim == 4 and place.ndim == 5:  # of one frame, without the dim of time
        output = output.unsqueeze(2)
    if output.shape != place.shape:
        raise Unsplittable(f"a worker made {tuple(output.shape)} where {tuple(place.shape)} was expected")
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
def _dividing(model: nn.Module, share: Share, tick: Callable[[], None]) -> Iterator[None]:
    """In this context `model` runs on this rank's rows."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tick()
        return functions.attend(share, query, key, value)

    with ExitStack() as stack:
        for module in model.modules():
            for name in vars(module).keys() & ATTENTION:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, attend)
        stack.enter_context(RowFunctions(share, HANDLERS, tick))
        yield


def leave_undivided(module: nn.Module) -> None:
    """Has `module` run as it is also in a divided model. It attends along time only, each pixel for itself."""
    forward = module.forward

    def undivided(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    module.forward = undivided


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
    F.scaled_dot_product_attention: functions.refuse_attention,
    **dict.fromkeys((torch.randn, torch.rand, torch.randn_like, torch.rand_like), functions.noise),
    **dict.fromkeys(REDUCTIONS, functions.reduce),
    **dict.fromkeys(ACROSS, functions.refuse),
}
