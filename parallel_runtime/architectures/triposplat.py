"""TripoSplat: points of a shape, a picture and a camera in one stream, after a refiner of the points; that of the
picture is computed in full by every rank. Rotations are made of hidden states between blocks, so from the second block
on a rank makes those of its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .architecture import Architecture, inputs_of
from .split_plan import JOINT, ModulePlan, Split, SplitPlan

POINTS = ("points",)
REFINER = ModulePlan(
    "noise_refiner",
    {"x": Split(POINTS), "rotary_emb": Split(POINTS)},
    attends=POINTS,
    unsplit_args=("mod",),
    gathers=True,
    updates=("x",),
    never_skipped=True,
)
BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(JOINT), "rotary_emb": Split(JOINT)},
    attends=JOINT,
    unsplit_args=("mod",),
    gathers=True,
    updates=("x",),
)


class SplatArchitecture(Architecture):
    """An Architecture whose latent is [B, points, C], beside a camera of one token."""

    def tokens(self, net: Any, latent_shape: Sequence[int], text: int) -> dict[str, int]:
        return {self.plan.main_stream: latent_shape[1] + text + 1}


NETWORK = SplatArchitecture(
    name="TripoSplat",
    kinds=("comfy.ldm.triposplat.model:LatentSeqMMFlowModel",),
    plan=SplitPlan((REFINER, BLOCKS)),
    text_width=inputs_of("cond_embedder"),
)
