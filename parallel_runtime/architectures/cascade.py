"""Stable Cascade: stage C, and stage B, which halves its picture. Their attentions see the text behind their pixels."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, log2
from typing import Any

from .row_plan import CascadeRowPlan, RowArchitecture, RowLevel


def _halvings(net: Any) -> list[int]:
    """How often each stack of blocks has its picture halved, from the first stack down; a stack sees patches."""
    first = int(log2(net.embedding[0].downscale_factor))
    steps = [any(getattr(part, "stride", 1) == (2, 2) for part in down.modules()) for down in net.down_downscalers]
    return [first + sum(steps[: number + 1]) for number in range(len(steps))]


@dataclass(frozen=True, kw_only=True)
class CascadeArchitecture(RowArchitecture):
    """An architecture whose blocks are in stacks, of which some run several times."""

    def attentions(self, net: Any) -> list[tuple[str, Any]]:
        return [(name, module) for name, module in net.named_modules() if type(module).__name__ == "Attention2D"]

    def heads(self, net: Any) -> int:
        return gcd(*(module.attn.heads for _, module in self.attentions(net)))

    def layers(self, net: Any) -> int:
        return sum(level.attentions for level in self.row_levels(net))

    def row_levels(self, net: Any) -> tuple[RowLevel, ...]:
        halvings = _halvings(net)
        counts = [[0, 0, 0, 0] for _ in range(halvings[-1] + 1)]
        down = zip(halvings, net.down_blocks, net.down_repeat_mappers, strict=False)
        up = zip(reversed(halvings), net.up_blocks, net.up_repeat_mappers, strict=False)
        for level, stack, mappers in (*down, *up):
            times, modules = len(mappers) + 1, list(stack.modules())
            kinds = [type(module).__name__ for module in modules]
            attentions = [module for module in modules if type(module).__name__ == "Attention2D"]
            counts[level][0] += times * sum(weight.numel() for weight in stack.parameters() if weight.ndim > 1)
            counts[level][1] += times * len(attentions)
            counts[level][2] += times * sum(module.attn.to_q.out_features for module in attentions)
            counts[level][3] += times * (kinds.count("ResBlock") + kinds.count("GlobalResponseNorm"))
        return tuple(
            RowLevel(weights=weights, attentions=layers, width=width // max(1, layers), messages=messages)
            for weights, layers, width, messages in counts
        )

    def row_ranks(self, net: Any, latent_shape: Any) -> int:
        """1 for a size that is no multiple of the last level's, which every rank computes in full."""
        if any(side % 2 ** self.plan.depth(net) for side in latent_shape[-2:]):
            return 1
        return super().row_ranks(net, latent_shape)


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
    ),
    width=lambda net: net.embedding[1].out_channels,
    fits=lambda net: not any(type(part).__name__ == "Upsample" for part in net.modules()),
)
