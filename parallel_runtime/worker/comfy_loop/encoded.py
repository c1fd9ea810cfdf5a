"""What stands on a model patch where its VAE was: its pictures are encoded. The other side is nodes/encoded.py."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ...errors import Refused


class Encoded:
    def __init__(self, described: dict[str, Any]) -> None:
        self._compression: int = described["compression"]

    def spacial_compression_encode(self) -> int:
        return self._compression

    def temporal_compression_decode(self) -> int:
        return 1

    def encode(self, pixels: Tensor) -> NoReturn:
        """Raises Refused: pixels [B, H, W, C] are of another size than the whole latent."""
        height, width = pixels.shape[1:3]
        raise Refused(
            f"a model patch asks for its picture at {width} x {height} pixels, which is not the size of the whole "
            "latent; take away the area of the prompt, or the patch"
        )
