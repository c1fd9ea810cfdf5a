"""Cosmos 1. Tokens come as [frames, rows, columns, B, C]; positions are added to them between blocks, in full."""

from .architecture import Architecture
from .split_plan import VIDEO, ModulePlan, Split, SplitLike, SplitPlan

NETWORK = Architecture(
    name="Cosmos 1",
    kinds=("comfy.ldm.cosmos.model:GeneralDIT",),
    plan=SplitPlan(
        (
            ModulePlan(
                "blocks",
                {"x": Split(VIDEO, dim=0, flat=3), "rope_emb_L_1_1_D": SplitLike(VIDEO, 0)},
                attends=VIDEO,
                submodule_attends={"blocks.1": "local"},
                unsplit_args=("emb_B_D", "crossattn_emb", "crossattn_mask", "adaln_lora_B_3D"),
                gathers="each",
            ),
        )
    ),
    patch=(1, 2, 2),
)
