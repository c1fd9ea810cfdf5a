"""The weights of one safetensors file, memory mapped. Knows no model.

Ranks of one host share the pages of the file, so N workers do not hold N copies in host memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from safetensors import safe_open
from torch import Tensor

from ..families.formats import refuse_quantised
from ..families.header import Header, header


class Weights:
    """A checkpoint's transformer. Raises ValueError for a file that is damaged or quantised."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.header: Header = header(path)
        refuse_quantised(self.header)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name without prefix, tensor) in the order of the file. The tensors are views of the mapped file."""
        return self.some(self.header.shapes)

    def some(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Those of them with these names."""
        with safe_open(self.path, framework="pt", device="cpu") as file:
            for name in names:
                yield name, file.get_tensor(self.header.prefix + name)
