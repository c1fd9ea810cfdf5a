"""A tensor in a memory file, into which the workers write a result that ComfyUI then uses without a copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..wire.bundles import empty_bundle


class SharedOutput:
    """A `tensor` over the memory file `fd`. It outlives `close`. Raises OSError (ENOSPC) without enough memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = prod(shape) * dtype.itemsize
        self.fd = empty_bundle(size)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype).view(tuple(shape))

    def offset_of(self, part: Tensor) -> int | None:
        """Returns the offset of `part` in `tensor`, in elements; None if it is no contiguous part of it."""
        shared = self.tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        return (
            int(part.storage_offset()) if shared and part.is_contiguous() and part.dtype == self.tensor.dtype else None
        )

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> SharedOutput:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
