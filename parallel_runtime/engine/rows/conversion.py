"""One decode or encode on this rank's rows, from a full tensor into shared memory for the full result; and the
self-test before the first of a class."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Refused
from ...specs import VAEMethod
from ..comm.mesh import MeshDim
from ..split.streams import chunk_sizes
from .functions import WIDE
from .row_share import Share
from .rows_mode import Rows, running_on_rows

CHUNKED = "comfy_has_chunked_io"  # ComfyUI's attribute: the VAE moves its input, and writes its output, chunk by chunk
PIECE_BYTES = 64 << 20
ACROSS = 4  # latent columns, of two rows a rank
FRAMES = {"decode": 3, "encode": 13}


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
            with running_on_rows(self.model, Rows(share, tick), self.over_time):
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
        small = _trial_input(x, self.method, total * self.unit, ACROSS * self.unit, dim)
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
    return 1e-3 if dtype in WIDE else 5e-2


def _trial_input(x: Tensor, method: VAEMethod, along: int, across: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[0] = min(2, shape[0])
    if x.ndim == 5:
        shape[2] = min(FRAMES[method], shape[2])
    shape[-2:] = (along, across) if dim == -2 else (across, along)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
