"""What is tried of each attention backend on one card: its dtypes, with and without masks, ring, Ulysses and alone."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from parallel_runtime.request import BACKENDS, AttentionBackend

RANKS = 2
DTYPES = {"auto": ("float32", "bfloat16"), "native": ("float32", "bfloat16")}  # the others: half precision only


class Case(NamedTuple):
    """`degrees` are ring x Ulysses. Sizes come from the seed: they divide by nothing."""

    backend: AttentionBackend
    dtype: str
    masked: bool
    grouped: bool
    degrees: tuple[int, int]

    def __str__(self) -> str:
        extras = [word for word, applies in (("mask", self.masked), ("grouped heads", self.grouped)) if applies]
        return ", ".join([self.backend, self.dtype, *extras, "ring {} x ulysses {}".format(*self.degrees)])


def cases() -> list[Case]:
    return [
        Case(backend, dtype, masked, grouped, degrees)
        for backend in BACKENDS
        for dtype, masked, grouped, degrees in product(
            DTYPES.get(backend, ("bfloat16",)), (False, True), (False, True), ((RANKS, 1), (1, RANKS))
        )
    ]
