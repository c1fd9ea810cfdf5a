"""Cosmos 1. Tokens come as [frames, rows, columns, B, C]; positions are added to them between blocks, whole."""

from ..plan import VIDEO, Along, Plan, Site, Tokens
from .network import Network

NETWORK = Network(
    name="Cosmos 1",
    kinds=("comfy.ldm.cosmos.model:GeneralDIT",),
    plan=Plan(
        (
            Site(
                "blocks",
                {"x": Tokens(VIDEO, dim=0, flat=3), "rope_emb_L_1_1_D": Along(VIDEO, 0)},
                attends=VIDEO,
                within={"blocks.1": "local"},
                whole=("emb_B_D", "crossattn_emb", "crossattn_mask", "adaln_lora_B_3D"),
                gathers="each",
            ),
        ),
    ),
    patch=(1, 2, 2),
)
