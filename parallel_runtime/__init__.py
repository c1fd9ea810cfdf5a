"""Context-parallel diffusion in a group of worker processes: docs/architecture.md draws its rooms.

This package always imports itself relatively: ComfyUI and torchrun load it under different names. OLDEST and TESTED are
versions of ComfyUI."""

from __future__ import annotations

OLDEST = "0.15.1"  # the first whose MODEL says which loader made it
TESTED = "0.33.0"  # the newest that our tests have run


def numbers(version: str) -> list[int]:
    return [int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3]]
