"""Cosmos 1, whose tokens come as [frames, rows, columns, B, C], with positions added to them in full between blocks.
Cosmos Predict2, and Anima, which puts a text adapter before it, have them as [B, frames, rows, columns, C]."""

from .architecture import Architecture
from .split_plan import VIDEO, Gather, ModulePlan, Split, SplitLike, SplitPlan

V1_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(VIDEO, dim=0, flat=3), "rope_emb_L_1_1_D": SplitLike(VIDEO, 0)},
    attends=VIDEO,
    submodule_attends={"blocks.1": "local"},
    unsplit_args=("emb_B_D", "crossattn_emb", "crossattn_mask", "adaln_lora_B_3D"),
    gathers="each",
)
V1 = Architecture(
    name="Cosmos 1",
    kinds=("comfy.ldm.cosmos.model:GeneralDIT",),
    plan=SplitPlan((V1_BLOCKS,)),
    patch=(1, 2, 2),
)

PREDICT2_BLOCKS = ModulePlan(
    "blocks",
    {
        "x_B_T_H_W_D": Split(VIDEO, flat=3),
        "emb_B_T_D": SplitLike(VIDEO, per=True),
        "adaln_lora_B_T_3D": SplitLike(VIDEO, per=True),
        "rope_emb_L_1_1_D": SplitLike(VIDEO),
    },
    attends=VIDEO,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("crossattn_emb",),
)
PREDICT2_LAST = ModulePlan(
    "final_layer",
    {
        "x_B_T_H_W_D": Gather(VIDEO, after=True),
        "emb_B_T_D": SplitLike(VIDEO, per=True),
        "adaln_lora_B_T_3D": SplitLike(VIDEO, per=True),
    },
)
PREDICT2 = Architecture(
    name="Cosmos Predict2",
    kinds=("comfy.ldm.cosmos.predict2:MiniTrainDIT", "comfy.ldm.anima.model:Anima"),
    plan=SplitPlan((PREDICT2_BLOCKS, PREDICT2_LAST)),
    patch=(1, 2, 2),
)
