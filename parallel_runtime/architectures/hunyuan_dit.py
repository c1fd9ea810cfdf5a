"""Hunyuan DiT. The second half of its blocks is given what the first half left. The text is read as keys only."""

from .architecture import Architecture
from .split_plan import IMAGE, Gather, ModulePlan, Split, SplitLike, SplitPlan

NETWORK = Architecture(
    name="Hunyuan DiT",
    kinds=("comfy.ldm.hydit.models:HunYuanDiT",),
    plan=SplitPlan(
        (
            ModulePlan(
                "blocks",
                {"x": Split(IMAGE), "freq_cis_img": SplitLike(IMAGE, 0), "skip": Split(IMAGE)},
                attends=IMAGE,
                submodule_attends={"attn2": "local"},
                unsplit_args=("c", "text_states"),
                updates=("x",),
                never_skipped=True,  # what a block leaves for later cannot be skipped
            ),
            ModulePlan("final_layer", {"x": Gather(IMAGE)}),
        ),
        residuals=("output",),
        no_options=("comfy.ldm.hydit.attn_layers",),
    ),
)
