"""PixArt alpha and sigma. The text is read as keys only. Its attention is called without transformer_options."""

from .architecture import Architecture
from .split_plan import IMAGE, Gather, ModulePlan, Split, SplitPlan

BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(IMAGE)},
    attends=IMAGE,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("y", "t", "mask", "HW"),
)
LAST = ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("t",))
NETWORK = Architecture(
    name="PixArt",
    kinds=("comfy.ldm.pixart.pixartms:PixArtMS",),
    plan=SplitPlan((BLOCKS, LAST), no_options=("comfy.ldm.pixart.blocks",)),
)
