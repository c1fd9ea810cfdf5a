"""Which rows (dim -2) or columns (dim -1) of every activation are whose."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import Refused
from ..engine.exchange import gather
from ..engine.mesh import Axis


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """Rank i of `ranks` holds `units[i]` rows of the latent. A level of the network that is f times as fine has f times
    as many everywhere."""

    ranks: Axis
    dim: int
    units: tuple[int, ...]
    _weights: dict[torch.device, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.dim in (-2, -1)
        assert len(self.units) == self.ranks.size
        assert min(self.units) >= 1, "a rank without rows: use fewer ranks"

    @property
    def index(self) -> int:
        return self.ranks.index

    @property
    def own(self) -> int:
        return self.units[self.index]

    @property
    def before(self) -> int:
        """Units of the ranks before this one."""
        return sum(self.units[: self.index])

    def factor(self, x: Tensor, what: str) -> int:
        """How fine the level of `x` is. Raises Refused where these cannot be this rank's rows."""
        rows = x.shape[self.dim]
        if rows % self.own:
            raise Refused(f"{what} of {tuple(x.shape)}: dim {self.dim} is no multiple of this rank's {self.own} rows")
        return rows // self.own

    def cut(self, x: Tensor, factor: int) -> Tensor:
        """This rank's rows of a whole tensor."""
        return x.narrow(self.dim, self.before * factor, self.own * factor)

    def whole(self, x: Tensor, what: str = "a gather") -> Tensor:
        """The rows of all ranks. Collective."""
        factor = self.factor(x, what)
        (rows,) = gather(x.movedim(self.dim, 0), [units * factor for units in self.units], self.ranks).wait()
        return rows.movedim(0, self.dim)

    def weights(self, device: torch.device) -> Tensor:
        """What each rank's mean counts in the mean of all: its share of the rows, float32."""
        if device not in self._weights:
            total = sum(self.units)
            self._weights[device] = torch.tensor([units / total for units in self.units], device=device)
        return self._weights[device]
