"""Stable Cascade: stage C, and stage B, which halves its picture. Their attentions see the text behind their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Any

from .row_plan import CascadeRowPlan, RowArchitecture


def _halvings(net: Any) -> list[int]:
    """How often each stack of blocks has its picture halved, from the first stack down; a stack sees patches."""
    first = int(log2(net.embedding[0].downscale_factor))
    steps = [any(getattr(part, "stride", 1) == (2, 2) for part in down.modules()) for down in net.down_downscalers]
    return [first + sum(steps[: number + 1]) for number in range(len(steps))]


@dataclass(frozen=True, kw_only=True)
class CascadeArchitecture(RowArchitecture):
    """An architecture whose blocks are in stacks, of which some run several times."""

    def attentions(self, net: Any) -> list[Any]:
        return [module.attn for module in net.modules() if type(module).__name__ == "Attention2D"]

    def blocks(self, net: Any) -> Iterator[tuple[int, int, Any]]:
        halvings = _halvings(net)
        down = zip(halvings, net.down_repeat_mappers, net.down_blocks, strict=False)
        up = zip(reversed(halvings), net.up_repeat_mappers, net.up_blocks, strict=False)
        for level, mappers, stack in (*down, *up):
            yield level, len(mappers) + 1, stack


NETWORK = CascadeArchitecture(
    name="Stable Cascade",
    kinds=("comfy.ldm.cascade.stage_c:StageC", "comfy.ldm.cascade.stage_b:StageB"),
    plan=CascadeRowPlan(
        (),
        depth=lambda net: _halvings(net)[-1],
        first=lambda net: _halvings(net)[0],
        attends=("attention",),
        local=(),
        local_below=(),
        forward="forward",
        fetched_classes=(),  # a stack that runs several times has no block that follows its last one
        across_classes=("GlobalResponseNorm",),
        resized=("effnet",),
        refused_split=("pixels",),
        only_multiples=True,  # at other sizes it resizes its pictures between levels
    ),
    sending_classes=("ResBlock", "GlobalResponseNorm"),
    width=lambda net: net.embedding[1].out_channels,
    fits=lambda net: not any(type(part).__name__ == "Upsample" for part in net.modules()),
)
