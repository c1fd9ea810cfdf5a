"""Memory that workers write a result into and ComfyUI goes on with: a tensor whose pages are those of a memory file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..wire.bundles import empty_bundle


class Room:
    """Raises OSError (ENOSPC) where the memory is not there. The tensor outlives `close`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = prod(shape) * dtype.itemsize
        self.fd = empty_bundle(size)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype).view(tuple(shape))

    def offset_of(self, part: Tensor) -> int | None:
        """Where `part` begins, in elements, if it is a contiguous piece of this room."""
        ours = self.tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        return int(part.storage_offset()) if ours and part.is_contiguous() and part.dtype == self.tensor.dtype else None

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
