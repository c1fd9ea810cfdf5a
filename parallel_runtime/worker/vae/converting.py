"""One decode or encode on this rank's rows: in from a whole tensor, out into the room where the whole result grows; and
the self-test that comes before the first of a class."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Refused
from ...specs import VAEMethod
from ..engine.mesh import Axis
from ..engine.streams import chunk_sizes
from .dividing import Rows, divided
from .share import Share

CHUNKED = "comfy_has_chunked_io"  # ComfyUI's word: the VAE moves its input, and writes its output, chunk by chunk
PIECE_BYTES = 64 << 20
ACROSS = 4  # latent columns, of two rows a rank
FRAMES = {"decode": 3, "encode": 13}
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_LIMIT = 5e-2  # rounding alone comes to 2e-2 in bfloat16


def longer_side(x: Tensor) -> int:
    """The dim to cut: fewer bytes travel, and rows are shared out more evenly."""
    return -2 if x.shape[-2] >= x.shape[-1] else -1


def share_of(x: Tensor, unit: int, ranks: Axis) -> Share:
    """`unit` rows of x make one of the latent. Raises Refused where they do not come out even."""
    dim = longer_side(x)
    units, left = divmod(x.shape[dim], unit)
    if left:
        raise Refused(f"{x.shape[dim]} pixels are no multiple of the {unit} that make a row of the latent")
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
        """This rank's rows of what it makes of all of `x`, in `place` where there is one. Collective."""
        self.chunks(share.own, sum(share.units))
        mine, options = share.cut(x, self.unit), dict[str, Any]()
        if getattr(self.model, CHUNKED, False):
            if self.method == "encode":
                options["device"] = self.device
            elif place is not None:
                options["output_buffer"] = place
        if "device" not in options:
            mine = mine.to(self.device)
        if share.ranks.size == 1:
            made = getattr(self.model, self.method)(mine, **options)
        else:
            with divided(self.model, Rows(share, tick), self.over_time):
                made = getattr(self.model, self.method)(mine.contiguous(), **options)
        if place is not None and made is not place:
            _put(made, place)
        return made

    def trial(self, x: Tensor, ranks: Axis, dim: int) -> float:
        """The self-test of a VAE's class: a small latent, divided, against the same one whole on this rank. Collective.

        The mode does not see all that looks across a cut (indexing, joining and products along the rows): this does.
        Relative L2 distance of this rank's rows, for something like `x`; not a number where they have none.
        """
        total = 2 * ranks.size
        share = Share(ranks=ranks, dim=dim, units=(2,) * ranks.size)
        alone = Share(ranks=Axis(), dim=dim, units=(total,))
        small = _like(x, self.method, total * self.unit, ACROSS * self.unit, dim)
        runs = []
        for part in (alone, share):
            _same_noise(self.device)
            runs.append(self.run(small, part).float())
        whole, mine = runs
        wanted = share.cut(whole, whole.shape[dim] // total)
        if wanted.shape != mine.shape:
            return float("inf")
        return float((mine - wanted).norm() / wanted.norm().clamp_min(1e-12))


def _put(made: Tensor, place: Tensor) -> None:
    """Copy to main memory as it is, and widen it there, a piece at a time: what is wide would fill the device."""
    if made.ndim == 4 and place.ndim == 5:  # of one frame, without the dim of time
        made = made.unsqueeze(2)
    if made.shape != place.shape:
        raise Refused(f"it made {tuple(made.shape)} on a worker where {tuple(place.shape)} was expected")
    dim = 2 if made.ndim == 5 else 0
    step = max(1, made.shape[dim] * PIECE_BYTES // max(1, made.numel() * made.element_size()))
    for piece, spot in zip(made.split(step, dim), place.split(step, dim), strict=True):
        spot.copy_(piece.to(place.device))


def limit(dtype: torch.dtype) -> float:
    return LIMITS.get(dtype, HALF_LIMIT)


def _like(x: Tensor, method: VAEMethod, along: int, across: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[0] = min(2, shape[0])
    if x.ndim == 5:
        shape[2] = min(FRAMES[method], shape[2])
    shape[-2:] = (along, across) if dim == -2 else (across, along)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)


def _same_noise(device: torch.device) -> None:
    torch.manual_seed(2)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(2)
