"""Procedural pictures: one flat shape on a flat backdrop, anti-aliased.

Knows colours and outlines (signed distance functions); knows nothing of words, latents or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.08, 0.10),
    "orange": (1.00, 0.50, 0.00),
    "yellow": (1.00, 0.88, 0.05),
    "green": (0.10, 0.65, 0.20),
    "blue": (0.10, 0.25, 0.90),
    "purple": (0.50, 0.12, 0.68),
    "pink": (1.00, 0.52, 0.76),
    "white": (0.98, 0.98, 0.98),
    "black": (0.04, 0.04, 0.04),
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What to draw: a centre in -1..1 of the canvas, a radius as a fraction of its shorter side."""

    shape: str
    colour: str
    background: str
    x: float
    y: float
    radius: float

    def __post_init__(self) -> None:
        assert self.shape in SHAPES, self.shape
        assert self.colour in COLOURS, self.colour
        assert self.background in COLOURS, self.background


def draw(picture: Picture, height: int, width: int) -> Tensor:
    """The picture as [3, height, width] in 0..1."""
    ink = coverage(picture, height, width)
    colour = torch.tensor(COLOURS[picture.colour])[:, None, None]
    background = torch.tensor(COLOURS[picture.background])[:, None, None]
    return background + (colour - background) * ink


def coverage(picture: Picture, height: int, width: int) -> Tensor:
    """How much of each pixel the shape covers, [height, width] in 0..1."""
    radius = picture.radius * min(height, width)
    y = torch.arange(height) + 0.5 - (picture.y + 1) * height / 2
    x = torch.arange(width) + 0.5 - (picture.x + 1) * width / 2
    distance = SHAPES[picture.shape](x[None, :] / radius, y[:, None] / radius)
    return (0.5 - distance * radius).clamp(0, 1)


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt() - 0.95


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.85


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    return (1.4 * x.abs() + y.abs() - 1.1) / math.hypot(1.4, 1)


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    y = y - 0.25
    return torch.maximum(y - 0.57, math.cos(math.pi / 6) * x.abs() - 0.5 * y - 0.57)


def _cross(x: Tensor, y: Tensor) -> Tensor:
    long, short = torch.maximum(x.abs(), y.abs()) - 1, torch.minimum(x.abs(), y.abs()) - 0.34
    return torch.maximum(long, short)


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return ((x * x + y * y).sqrt() - 0.73).abs() - 0.25


def _heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = 0.6 * x.abs(), 0.57 - 0.6 * y
    x, y = torch.broadcast_tensors(x, y)
    lobe = torch.hypot(x - 0.25, y - 0.75) - math.sqrt(2) / 4
    along = 0.5 * (x + y).clamp(min=0)
    flank = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - along, y - along)) * torch.sign(x - y)
    return torch.where(x + y > 1, lobe, flank) / 0.6


def _star(x: Tensor, y: Tensor) -> Tensor:
    """Five points: the angle is folded into half a point, whose edge is one straight line."""
    y = y - 0.08
    outer, inner, half = 1.1, 0.46, math.pi / 5
    angle = torch.atan2(x, -y).abs() % (2 * half)
    angle = torch.minimum(angle, 2 * half - angle)
    radius = (x * x + y * y).sqrt()
    along, across = radius * angle.cos(), radius * angle.sin()
    run, rise = inner * math.cos(half) - outer, inner * math.sin(half)
    return (rise * (outer - along) + run * across) * -1 / math.hypot(run, rise)


SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "heart": _heart,
    "diamond": _diamond,
}
