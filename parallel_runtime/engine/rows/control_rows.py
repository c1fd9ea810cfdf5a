"""Makes a UNet's ControlNet context parallel: its own forward runs on the rows that this rank has in the UNet.

It returns only this rank's rows of each residual, which the UNet's RowDivision expects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...architectures.control_networks import ControlRowPlan
from ..attention.attention_override import OVERRIDE
from ..comm.collectives import all_gather_v
from .levels import Levels
from .row_division import Forward, RowDivision, split_residuals


class ControlRowDivision(RowDivision):
    """The replaced forwards of one ControlNet's network, and the state of its forward in progress."""

    _plan: ControlRowPlan
    _unet: RowDivision
    _hint_levels: dict[Levels, Levels]  # by those of the latent

    def return_residuals_to(self, consumer: RowDivision) -> None:
        """Has this network compute the rows that `consumer`, the UNet, has."""
        self._unet, self._hint_levels = consumer, {}

    def _adopt(self, name: str, module: nn.Module) -> None:
        if name.rpartition(".")[2] in self._plan.averaged:
            self.enter_context(module.register_forward_pre_hook(self._mean_of_all))
        else:
            super()._adopt(name, module)

    def _forward(  # type: ignore[override]  # its network is always given a hint
        self, forward: Forward, x: Tensor, hint: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces the network's forward; full pictures in, this rank's rows of its residuals out."""
        of_latent = self._unet.levels_of(x.shape)
        if of_latent is None:
            return forward(x, hint, *args, **kwargs)
        levels = self._with_hint(of_latent)
        if not levels.is_full(hint):
            return split_residuals(forward(x, hint, *args, **kwargs), of_latent)
        with self._dividing(levels, None):
            return forward(levels.split(x), levels.split(hint), *args, **kwargs)

    def _attend(self, local: bool, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Gives an attention the override: ComfyUI gives a ControlNet no transformer_options."""
        if self.is_divided:
            kwargs["transformer_options"] = {**kwargs.get("transformer_options", {}), OVERRIDE: self._override}
        return super()._attend(local, forward, x, *args, **kwargs)

    def _with_hint(self, of_latent: Levels) -> Levels:
        """Returns the levels of the hint's picture, of which the last are those of the latent."""
        if of_latent not in self._hint_levels:
            finer = 2**self._plan.hint_halvings
            self._hint_levels[of_latent] = Levels(
                ranks=of_latent.ranks,
                dim=of_latent.dim,
                units=of_latent.units,
                rows=of_latent.rows * finer,
                across=of_latent.across * finer,
                depth=of_latent.depth + self._plan.hint_halvings,
            )
        return self._hint_levels[of_latent]

    def _mean_of_all(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Replaces means [B, items, C] over this rank's rows of the latent by means over all rows."""
        if (levels := self._levels) is None:
            return None
        rows = levels.sizes[self._plan.hint_halvings]
        (means,) = all_gather_v(args[0].float()[None], [1] * len(rows), levels.ranks).wait()
        shares = torch.tensor([each / sum(rows) for each in rows], device=means.device)
        return (torch.tensordot(shares, means, 1).to(args[0]), *args[1:])
