"""Cosmos Predict2, and Anima, which puts a text adapter before it. Tokens come as [B, frames, rows, columns, C]."""

from ..plan import VIDEO, Along, Plan, Site, Tokens
from .network import Network

PLAN = Plan(
    (
        Site(
            "blocks",
            {
                "x_B_T_H_W_D": Tokens(VIDEO, flat=3),
                "emb_B_T_D": Along(VIDEO, per=True),
                "adaln_lora_B_T_3D": Along(VIDEO, per=True),
                "rope_emb_L_1_1_D": Along(VIDEO),
            },
            attends=VIDEO,
            within={"cross_attn": "local"},
            whole=("crossattn_emb",),
            gathers=True,
        ),
    ),
)

NETWORK = Network(
    name="Cosmos Predict2",
    kinds=("comfy.ldm.cosmos.predict2:MiniTrainDIT", "comfy.ldm.anima.model:Anima"),
    plan=PLAN,
    patch=(1, 2, 2),
)
