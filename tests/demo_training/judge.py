"""Says what a picture shows by measuring it: no neural network, only drawn templates laid over it.

Knows drawing; knows nothing of prompts, latents or models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .draw import COLOURS, SHAPES, Picture, coverage

NEAR = 0.22  # how far a colour may be from its name, in RGB
STAND_OUT = 0.2  # how far a pixel must be from the backdrop to belong to the shape


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was seen; a colour or shape that is no clear match is ''. fit is the overlap of the best template."""

    shape: str
    colour: str
    background: str
    fit: float


NOTHING = Verdict(shape="", colour="", background="", fit=0.0)


def judge(image: Tensor, *, least_fit: float = 0.8) -> Verdict:
    """The verdict on a picture [H, W, 3] in 0..1."""
    border = torch.cat([image[:2].flatten(0, 1), image[-2:].flatten(0, 1), image[:, :2].flatten(0, 1)])
    backdrop = border.median(0).values
    apart = (image - backdrop).norm(dim=-1)
    inside = apart > max(STAND_OUT, 0.6 * apart.max().item())
    if not 0.005 < inside.float().mean().item() < 0.7:
        return replace(NOTHING, background=_nearest(backdrop))
    ink = image[inside].median(0).values
    line = ink - backdrop
    covered = ((image - backdrop) @ line / (line @ line)).clamp(0, 1)
    stray = (image - backdrop - covered[..., None] * line).norm(dim=-1)
    shape, fit = _best_shape(covered)
    fit *= 1 - (stray > NEAR).float().mean().item()
    seen = Verdict(shape=shape, colour=_nearest(ink), background=_nearest(backdrop), fit=fit)
    return seen if fit >= least_fit else replace(seen, shape="")


def _nearest(colour: Tensor) -> str:
    apart = {name: (colour - torch.tensor(rgb)).norm().item() for name, rgb in COLOURS.items()}
    name = min(apart, key=lambda name: apart[name])
    return name if apart[name] < NEAR else ""


def _best_shape(covered: Tensor) -> tuple[str, float]:
    fits = {shape: _best_fit(shape, covered) for shape in SHAPES}
    shape = max(fits, key=lambda shape: fits[shape])
    return shape, fits[shape]


def _best_fit(shape: str, covered: Tensor) -> float:
    """The overlap of a template of the same area and centroid, then of its neighbours, as long as that helps."""
    guess = _same_moments(shape, covered)
    best = _overlap(guess, covered)
    stride = 0.04
    while stride > 0.005:
        moves = [replace(guess, x=guess.x + a * stride, y=guess.y + b * stride) for a, b in CROSS]
        moves += [replace(guess, radius=guess.radius * (1 + a * stride)) for a in (-1, 1)]
        fit, move = max(((_overlap(move, covered), i) for i, move in enumerate(moves)))
        if fit > best:
            best, guess = fit, moves[move]
        else:
            stride /= 2
    return best


CROSS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def _overlap(picture: Picture, covered: Tensor) -> float:
    template = coverage(picture, *covered.shape)
    return (torch.minimum(template, covered).sum() / torch.maximum(template, covered).sum()).item()


def _same_moments(shape: str, covered: Tensor) -> Picture:
    """The template whose area and centroid are those of the covered pixels."""
    height, width = covered.shape
    unit = Picture(shape=shape, colour="red", background="white", x=0, y=0, radius=0.25)
    own_area, own_y, own_x = _moments(coverage(unit, 256, 256))  # drawn with a radius of 64 pixels
    area, y, x = _moments(covered)
    grown = (area / own_area) ** 0.5
    radius = 64 * grown / min(height, width)
    x, y = x - own_x * grown, y - own_y * grown
    return replace(unit, x=2 * x / width, y=2 * y / height, radius=radius)


def _moments(covered: Tensor) -> tuple[float, float, float]:
    """(area, centroid's y, centroid's x) in pixels from the middle."""
    height, width = covered.shape
    area = covered.sum()
    y = (covered.sum(1) * (torch.arange(height) + 0.5 - height / 2)).sum() / area
    x = (covered.sum(0) * (torch.arange(width) + 0.5 - width / 2)).sum() / area
    return area.item(), y.item(), x.item()
