"""The divisions that every case of the engine runs on: ring, Ulysses and cfg degree, and the shares of the ranks."""

from __future__ import annotations

from math import prod

Degrees = tuple[int | tuple[int, ...], ...]

ALIKE: list[Degrees] = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]
UNLIKE: list[Degrees] = [
    (2, 1, 1, (3, 2)), (1, 2, 1, (3, 2)), (3, 1, 1, (1, 4, 2)), (1, 3, 1, (1, 4, 2)), (4, 1, 1, (5, 0, 1, 3)),
    (1, 4, 1, (5, 0, 1, 3)), (2, 2, 1, (5, 3, 1, 2)),
]  # fmt: skip
EVERY = ALIKE + UNLIKE


def world_of(degrees: Degrees) -> int:
    """How many ranks these are."""
    return prod(degree for degree in degrees if isinstance(degree, int))
