"""What ComfyUI lets others do between a network's blocks: ControlNet residuals, patches, replaced blocks.

Residuals are cut like the stream that they are added to. For patches and replaced blocks tokens are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...errors import Refused
from ...inside_blocks import INSIDE, see_all_tokens
from .cuts import Cuts

BEFORE = {"post_input"}
BETWEEN = {"double_block", "single_block", "noise_refiner"}
OF_UNETS = {
    "input_block_patch", "input_block_patch_after_skip", "output_block_patch", "middle_patch", "middle_block_patch",
    "middle_block_after_patch", "emb_patch", "forward_timestep_embed_patch",
}  # fmt: skip  # called by no network of tokens


def wants_whole(options: Mapping[str, Any]) -> bool:
    """Must tokens be whole between blocks for what `transformer_options` brings? Refused where that is not enough."""
    given = options.get("patches") or {}
    patches = {kind for kind, functions in given.items() if functions}
    if inside := sorted(patches - BEFORE - BETWEEN - OF_UNETS - set(INSIDE)) + see_all_tokens(given):
        raise Refused(
            f"{', '.join(inside)} would run inside blocks, where a worker holds a part of the tokens; take the node "
            "that sets it away, or set ring and Ulysses degrees to 1"
        )
    return bool(patches & BETWEEN) or bool((options.get("patches_replace") or {}).get("dit"))


class Residuals(list[Any]):
    """A ControlNet's residuals of the stream `main`, cut when they are asked for if the stream is then."""

    def __init__(self, whole: list[Any], cuts: Cuts, main: str) -> None:
        super().__init__(whole)
        self._cuts = cuts
        self._main = main

    def __getitem__(self, index: Any) -> Any:
        return self._cut(super().__getitem__(index))

    def __iter__(self) -> Iterator[Any]:
        return map(self._cut, super().__iter__())

    def pop(self, index: Any = -1) -> Any:
        return self._cut(super().pop(index))

    def _cut(self, residual: Any) -> Any:
        if not isinstance(residual, Tensor) or not self._cuts.holds(self._main):
            return residual
        return self._cuts.prefix(residual, self._main)
