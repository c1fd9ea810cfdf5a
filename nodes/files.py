"""A file that a model was loaded from: what pins it, and which of the model's weights can be compared with it."""

from __future__ import annotations

import os

from torch import Tensor

from ..parallel_runtime.specs import SourceFile

SAFE = (".safetensors", ".sft")


def file_of(path: str) -> SourceFile:
    """It as it is now. Raises FileNotFoundError."""
    stat = os.stat(path)
    return SourceFile(path=os.path.realpath(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def comparable(slot: Tensor, shape: list[int]) -> bool:
    """Whether a weight holds the very numbers of a file's tensor of this shape, but for their dtype."""
    return type(slot.data) is Tensor and list(slot.shape) == list(shape) and not slot.is_meta
