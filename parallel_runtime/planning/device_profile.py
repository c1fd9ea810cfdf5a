"""What devices measured when their workers met: how fast each computes, and how fast they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Speed:
    """FLOP/s of one worker, of matrix products and in attention; 0 for not measured."""

    products: float
    attention: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Bytes/s between two workers, FLOP/s of one, bytes/s from main memory to a device while all copy; and the speed of
    each of the `ranks`, as it was measured."""

    bytes_per_second: float
    flops_per_second: float
    host_bytes_per_second: float = 0.0
    ranks: tuple[Speed, ...] = ()

    def of(self, ranks: Sequence[int]) -> DeviceProfile:
        """Returns the profile of these ranks; () for all of them."""
        if not self.ranks or not ranks:
            return self
        speeds = tuple(self.ranks[rank] for rank in ranks)
        return replace(self, ranks=speeds, flops_per_second=min(speed.products for speed in speeds))
