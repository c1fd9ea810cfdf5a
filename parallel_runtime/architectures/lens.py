"""Lens."""

from .architecture import Architecture
from .split_plan import IMAGE, TEXT, Gather, ModulePlan, Split, SplitLike, SplitPlan

BOTH = IMAGE + TEXT
BLOCKS = ModulePlan(
    "transformer_blocks",
    {
        "encoder_hidden_states": Split(TEXT),
        "hidden_states": Split(IMAGE),
        "freqs_cis": SplitLike(BOTH, 2),
        "attention_mask": SplitLike(BOTH, -1),
    },
    attends=BOTH,
    unsplit_args=("temb",),
)
NETWORK = Architecture(
    name="Lens",
    kinds=("comfy.ldm.lens.model:LensTransformer2DModel",),
    plan=SplitPlan((BLOCKS, ModulePlan("proj_out", {0: Gather(IMAGE, after=True)}))),
    patch=(1, 1, 1),
)
