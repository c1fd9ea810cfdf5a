"""Makes a network of Stable Cascade context parallel by rows: with the text's keys in its attentions, and pictures that
it resizes to its own size."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from ...architectures.row_plan import CascadeRowPlan
from ...architectures.split_plan import TEXT, Cross
from ...specs import Parallelism
from ..attention.attention_override import backend_override
from ..comm.mesh import ContextMesh
from .levels import Levels
from .row_division import OVERRIDE, Forward, RowDivision


class CascadeDivision(RowDivision):
    """The replaced forwards of one network, and the state of its forward in progress."""

    _plan: CascadeRowPlan

    def __init__(self, network: nn.Module, plan: CascadeRowPlan, mesh: ContextMesh, parallelism: Parallelism) -> None:
        self._first = plan.first(network)
        self._signature = inspect.signature(network.forward)
        super().__init__(network, plan, mesh, parallelism)
        levels = [(str(level),) for level in range(self.depth + 1)]
        self._across = self._override.scope_index([Cross(queries=level, keys=(*level, *TEXT)) for level in levels])

    def levels_of(self, shape: Size) -> Levels | None:
        """Returns None too for a size that is no multiple of the last level's: the network resizes its pictures
        then."""
        return None if any(side % 2**self.depth for side in shape[-2:]) else super().levels_of(shape)

    def _forward(self, forward: Forward, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Replaces the network's forward, which has other arguments than a UNet's; [B, C, H, W] in and out."""
        call = self._signature.bind(*args, **kwargs)
        arguments = call.arguments
        x, options = arguments["x"], dict(arguments.get("transformer_options") or {})
        levels = self.levels_of(x.shape)
        if levels is None or any(arguments.get(name) is not None for name in self._plan.refused_split):
            if self._backend != "auto":
                arguments["transformer_options"] = {OVERRIDE: backend_override(self._backend), **options}
            return forward(*call.args, **call.kwargs)  # type: ignore[no-any-return]
        with self._dividing(levels, options.get(OVERRIDE)):
            arguments |= {"x": levels.split(x), "transformer_options": {**options, OVERRIDE: self._override}}
            for name in arguments.keys() & self._plan.resized:
                arguments[name] = self._resized(arguments[name], levels)
            if control := arguments.get("control"):
                arguments["control"] = {
                    kind: [None if each is None else self._resized(each, levels) for each in residuals]
                    for kind, residuals in control.items()
                }
            return levels.gather(forward(*call.args, **call.kwargs))

    def _resized(self, picture: Tensor, levels: Levels) -> Tensor:
        """Returns this rank's rows of `picture`, resized as the network does."""
        size = levels.full_plane(self._first)
        return levels.split(F.interpolate(picture, size=size, mode="bilinear", align_corners=True))

    def _attend(self, local: bool, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Of a module that is given a picture and the text, and with `self_attn` puts the picture's keys before it."""
        keys, levels = args[0], self._levels
        local = local or levels is None or not kwargs.get("self_attn", False)
        if levels is not None and not local:
            self._tokens.record_length(TEXT[0], keys.shape[1], "the text")
            if self._collects_tokens:
                tokens = levels.gather_flat(x.flatten(2).transpose(1, 2))
                args, local = (torch.cat([tokens, keys], 1), *args[1:]), True
                kwargs["self_attn"] = False
        return super()._attend(local, forward, x, *args, **kwargs)
