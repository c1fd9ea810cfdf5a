"""Cosmos Predict2, and Anima, which puts a text adapter before it. Tokens come as [B, frames, rows, columns, C]."""

from .architecture import Architecture
from .split_plan import VIDEO, ModulePlan, Split, SplitLike, SplitPlan

PLAN = SplitPlan(
    (
        ModulePlan(
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
            gathers=True,
        ),
    )
)

NETWORK = Architecture(
    name="Cosmos Predict2",
    kinds=("comfy.ldm.cosmos.predict2:MiniTrainDIT", "comfy.ldm.anima.model:Anima"),
    plan=PLAN,
    patch=(1, 2, 2),
)
