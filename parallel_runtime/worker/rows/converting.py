"""One decode or encode on this rank's rows: in from a whole tensor, out into the room where the whole result grows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Refused
from ...specs import VAEMethod
from ..engine.mesh import Axis
from ..engine.streams import chunk_sizes
from .dividing import divided
from .mode import Rows
from .share import Share

CHUNKED = "comfy_has_chunked_io"  # ComfyUI's word: the VAE moves its input, and writes its output, chunk by chunk
PIECE_BYTES = 64 << 20


def longer_side(x: Tensor) -> int:
    """The dim to cut: fewer bytes travel, and rows are shared out more evenly."""
    return -2 if x.shape[-2] >= x.shape[-1] else -1


def share_of(x: Tensor, unit: int, ranks: Axis) -> Share:
    """`unit` rows of x make one of the latent. Raises Refused where they do not come out even."""
    dim = longer_side(x)
    units, left = divmod(x.shape[dim], unit)
    if left:
        raise Refused(f"{x.shape[dim]} pixels are no multiple of the {unit} that make a row of the latent")
    return Share(ranks=ranks, dim=dim, units=chunk_sizes(units, ranks.size))


def convert(
    model: nn.Module,
    method: VAEMethod,
    x: Tensor,
    share: Share,
    *,
    unit: int = 1,
    place: Tensor | None = None,
    tick: Callable[[], None] = lambda: None,
    over_time: Collection[str] = (),
    device: torch.device | None = None,
) -> Tensor:
    """This rank's rows of `model.decode(x)` or `model.encode(x)`, in `place` where there is one. Collective."""
    device = device or x.device
    mine, options = share.cut(x, unit), dict[str, Any]()
    if getattr(model, CHUNKED, False):
        if method == "encode":
            options["device"] = device
        elif place is not None:
            options["output_buffer"] = place
    if "device" not in options:
        mine = mine.to(device)
    if share.ranks.size == 1:
        made = getattr(model, method)(mine, **options)
    else:
        with divided(model, Rows(share, tick), over_time):
            made = getattr(model, method)(mine.contiguous(), **options)
    if place is not None and made is not place:
        _put(made, place)
    return made


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
