"""How a network of convolutions is split: by rows of the picture at each of its levels; and the plans of UNets
and Stable Cascade. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, log2
from typing import Any

from .split_plan import IMAGE, Architecture, Names, SplitPlan

PICTURE = (-2, -1)  # dims of rows and columns
RESAMPLES = ("Downsample", "Upsample")  # classes of modules between two levels of a UNet


@dataclass(frozen=True, kw_only=True)
class RowLevel:
    """A level of a network that is split by rows.

    Each of its pixels is multiplied by `weights`. It has `attentions` over all its pixels, as wide as `width`, and
    sends `messages` to other ranks besides those of attentions."""

    weights: int
    attentions: int
    width: int
    messages: int


@dataclass(frozen=True)
class RowPlan(SplitPlan):
    """A plan without tokens between blocks: each rank computes its rows of every activation.

    `depth` says how often a network halves its picture. Self-attentions, modules that end in one of `attends`, are of
    all ranks' rows; those that end in one of `local` each rank computes for its own rows, as it does all that is below
    a module named in `local_below`. `forward` is the method that is replaced: what ComfyUI wraps around it sees full
    pictures. There are no `module_plans`: ComfyUI calls the layers of a UNet's blocks one by one, and never a block.
    `fetched_classes` are the classes of modules that it calls, and before which their weights may be fetched. Modules
    of `across_classes` have statistics of all pixels. With an argument of `refused_split`, and with `only_multiples` at
    sizes that are no multiple of the last level's, every rank computes all of it."""

    depth: Callable[[Any], int] = field(kw_only=True)
    attends: Names = ("attn1",)
    local: Names = ("attn2",)
    local_below: Names = ("time_stack",)
    forward: str = "_forward"
    fetched_classes: Names = ("ResBlock", "VideoResBlock", "BasicTransformerBlock")
    across_classes: Names = ()
    refused_split: Names = ()
    only_multiples: bool = False

    def attends_across(self, path: str) -> bool:
        """Whether the module at `path` is an attention over all ranks' rows."""
        *above, name = path.split(".")
        return name in self.attends and not set(above) & set(self.local_below)

    @property
    def main_stream(self) -> str:  # type: ignore[override]  # there it is cached
        return IMAGE[0]

    @property
    def streams(self) -> frozenset[str]:
        return frozenset(IMAGE)


@dataclass(frozen=True)
class CascadeRowPlan(RowPlan):
    """The plan of a network whose blocks begin at level `first`, and whose attentions have the text's keys behind those
    of the pixels. It resizes the arguments `resized`, and residuals, to the pixels of that level."""

    first: Callable[[Any], int] = field(kw_only=True)
    resized: Names = field(default=(), kw_only=True)


@dataclass(frozen=True)
class ControlRowPlan(RowPlan):
    """The plan of a UNet's ControlNet. `depth` counts from the hint, whose picture is halved `hint_halvings` times
    before it has the latent's rows. What modules of the names in `averaged` are given are means over the picture."""

    hint_halvings: int = field(default=3, kw_only=True)
    averaged: Names = field(default=(), kw_only=True)


@dataclass(frozen=True, kw_only=True)
class RowArchitecture(Architecture):
    """An architecture with a RowPlan, a UNet. Modules of `sending_classes`, and attentions, send messages."""

    plan: RowPlan
    patch: Sequence[int] = (1, 1, 1)
    sending_classes: Names = ("GroupNorm", *RESAMPLES)

    def attentions(self, net: Any) -> list[Any]:
        """Self-attentions over all rows."""
        return [module for path, module in net.named_modules() if self.plan.attends_across(path)]

    def blocks(self, net: Any) -> Iterator[tuple[int, int, Any]]:
        """The level of each block, how often it runs, and the block."""
        level = 0
        middle = [net.middle_block] if net.middle_block is not None else []  # distilled ones have none
        for stack, step in ((net.input_blocks, 1), (middle, 0), (net.output_blocks, -1)):
            for block in stack:
                yield level, 1, block
                level += step if any(type(module).__name__ in RESAMPLES for module in block.modules()) else 0

    def layers(self, net: Any) -> int:
        return sum(level.attentions for level in self.row_levels(net))

    def heads(self, net: Any) -> int:
        """Of all its attentions: what divides the heads of each."""
        return gcd(*(attention.heads for attention in self.attentions(net)))

    def row_levels(self, net: Any) -> tuple[RowLevel, ...]:
        """The work of each level, for planning."""
        counts = [[0, 0, 0, 0] for _ in range(self.plan.depth(net) + 1)]
        attends = set(self.attentions(net))
        for level, runs, block in self.blocks(net):
            attentions = [module for module in block.modules() if module in attends]
            counts[level][0] += runs * sum(weight.numel() for weight in block.parameters() if weight.ndim > 1)
            counts[level][1] += runs * len(attentions)
            counts[level][2] += runs * sum(attention.to_q.out_features for attention in attentions)
            counts[level][3] += runs * sum(type(module).__name__ in self.sending_classes for module in block.modules())
        return tuple(
            RowLevel(weights=weights, attentions=layers, width=width // max(1, layers), messages=messages)
            for weights, layers, width, messages in counts
        )

    def row_ranks(self, net: Any, latent_shape: Sequence[int]) -> int:
        """How many ranks can share a picture: rows of its last level."""
        sides = sides_to_cut(latent_shape, self.plan.depth(net), only_multiples=self.plan.only_multiples)
        return max((rows for _, rows in sides), default=1)


def sides_to_cut(latent_shape: Sequence[int], depth: int, *, only_multiples: bool = False) -> list[tuple[int, int]]:
    """The sides of a latent [..., H, W] that may be split over ranks, the longer one first: the dim, and how many rows
    the last of `depth` halvings leaves. A level is known by its other side, which each of them has to halve. With
    `only_multiples` there are none unless both sides are multiples of the last level's pixels."""
    height, width = latent_shape[-2:]
    sides: list[tuple[int, int]] = []
    if only_multiples and (height % 2**depth or width % 2**depth):
        return sides
    for dim in PICTURE if height >= width else PICTURE[::-1]:
        across = latent_shape[-3 - dim]
        if len({-(-across // 2**level) for level in range(depth + 1)}) > depth:
            sides.append((dim, -(-latent_shape[dim] // 2**depth)))
    return sides


UNET = RowArchitecture(
    name="UNet",
    kinds=("comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",),
    plan=RowPlan((), depth=lambda net: len(net.channel_mult) - 1),
    images_coupled=lambda net: net.use_temporal_resblocks,  # a video's: its batch are frames
)


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


CASCADE = CascadeArchitecture(
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
