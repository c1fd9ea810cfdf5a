"""What to draw and how to say it: random pictures with the prompts that ask for them.

Knows drawing and wording; knows nothing of latents or models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from parallel_runtime.demo.words_and_pictures import PLACES, SIZES

from .draw import COLOURS, SHAPES, Picture

CELL = 8  # pixels: centres and radii are multiples of a latent pixel, which leaves fewer patches to learn
RADII = {"": 48, "small": 32, "large": 56}  # on a canvas whose shorter side is 128
ASIDE = 32  # the largest radius of a shape that must move aside
SIDES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1), "center": (0, 0)}


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Which facts a prompt tells, and in which form: all prompts of one wording have the same length."""

    article: bool
    size: bool
    colour: bool
    shape: bool
    place: str
    background: str

    def says(self, size: str, picture: Picture, place: str) -> str:
        parts = ["a"] if self.article else []
        parts += [size] if self.size else []
        parts += [picture.colour] if self.colour else []
        parts += [picture.shape] if self.shape else []
        parts += [self.place.format(place)] if self.place else []
        parts += [self.background.format(picture.background)] if self.background else []
        return " ".join(parts)


def any_wording(rng: random.Random) -> Wording:
    """A wording as a user might choose it."""
    places = ("at the {}", "on the {}", "in the {}", "{}")
    backgrounds = ("on a {} background", "on a {} background", "on a {} background", "on {}", "{} background")
    colour = rng.random() < 0.95
    return Wording(
        article=rng.random() < 0.6,
        size=rng.random() < 0.2,
        colour=colour,
        shape=not colour or rng.random() < 0.95,
        place=rng.choice(places) if rng.random() < 0.25 else "",
        background=rng.choice(backgrounds) if rng.random() < 0.5 else "",
    )


def any_picture(rng: random.Random, wording: Wording, height: int, width: int) -> tuple[Picture, str]:
    """A picture and its prompt; where no backdrop is told it is white, or black behind a white shape."""
    colour, other = rng.sample(list(COLOURS), 2)
    background = other if wording.background else backdrop(colour)
    size = rng.choice(SIZES) if wording.size else ""
    place = rng.choice(PLACES) if wording.place else ""
    radius = _radius(size, place, min(height, width))
    x, y = (2 * _offset(place, side // 2 - radius, axis) / side for axis, side in enumerate((width, height)))
    picture = Picture(
        shape=rng.choice(list(SHAPES)),
        colour=colour,
        background=background,
        x=x,
        y=y,
        radius=radius / min(height, width),
    )
    return picture, wording.says(size, picture, place)


def backdrop(colour: str) -> str:
    """The backdrop of a prompt that names none."""
    return "black" if colour == "white" else "white"


def _radius(size: str, place: str, shorter: int) -> int:
    """In pixels."""
    radius = min(RADII[size], ASIDE) if place else RADII[size]
    return CELL * round(radius * shorter / 128 / CELL)


def _offset(place: str, space: int, axis: int) -> int:
    """Pixels from the middle along one axis; room is how far the shape may go and still be on the canvas."""
    return SIDES[place or "center"][axis] * (max(space - 2, 0) // CELL * CELL)
