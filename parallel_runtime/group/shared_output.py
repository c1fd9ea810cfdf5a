"""A tensor in a memory file, into which the workers write a result that ComfyUI then uses without a copy."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..wire.bundles import empty_bundle


class SharedOutput:
    """A `tensor` over the memory file `fd`, which is closed with this object. The tensor outlives it. Raises OSError
    (ENOSPC) without enough memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = prod(shape) * dtype.itemsize
        self.fd = empty_bundle(size)
        weakref.finalize(self, os.close, self.fd)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype).view(tuple(shape))

    def offset_of(self, part: Tensor) -> int | None:
        """Returns the offset of `part` in `tensor`, in elements; None if it is no contiguous part of it."""
        shared = self.tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        return (
            int(part.storage_offset()) if shared and part.is_contiguous() and part.dtype == self.tensor.dtype else None
        )
