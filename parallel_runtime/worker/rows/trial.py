"""The self-test of a VAE's class: a small latent, divided, against the same one whole on this rank.

The mode does not see all that looks across a cut (indexing, joining and products along the rows): this does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from ...specs import VAEMethod
from ..engine.mesh import Axis
from .converting import convert
from .share import Share

ACROSS = 4  # latent columns, of two rows a rank
FRAMES = {"decode": 3, "encode": 13}
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_LIMIT = 5e-2  # rounding alone comes to 2e-2 in bfloat16


def trial(
    model: nn.Module,
    method: VAEMethod,
    x: Tensor,
    unit: int,
    ranks: Axis,
    dim: int,
    *,
    device: torch.device,
    over_time: Collection[str] = (),
    chunks: Callable[[int, int], None] = lambda own, total: None,
) -> float:
    """Relative L2 distance of this rank's rows, for something like `x`; not a number where they have none. Collective.

    `chunks(own, total)` is called before a run of so many of the rows.
    """
    share = Share(ranks=ranks, dim=dim, units=(2,) * ranks.size)
    small = _like(x, method, 2 * unit * ranks.size, ACROSS * unit, dim)
    total = 2 * ranks.size
    alone = Share(ranks=Axis(), dim=dim, units=(total,))
    runs = []
    for part in (alone, share):
        chunks(part.own, total)
        _same_noise(device)
        runs.append(convert(model, method, small, part, unit=unit, over_time=over_time, device=device).float())
    whole, mine = runs
    wanted = share.cut(whole, whole.shape[dim] // total)
    if wanted.shape != mine.shape:
        return float("inf")
    return float((mine - wanted).norm() / wanted.norm().clamp_min(1e-12))


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
