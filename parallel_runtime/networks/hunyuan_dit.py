"""Hunyuan DiT. The second half of its blocks is given what the first half left. The text is read as keys only."""

from ..plan import IMAGE, Along, Plan, Site, Tokens, Whole
from .network import Network

NETWORK = Network(
    name="Hunyuan DiT",
    kinds=("comfy.ldm.hydit.models:HunYuanDiT",),
    plan=Plan(
        (
            Site(
                "blocks",
                {"x": Tokens(IMAGE), "freq_cis_img": Along(IMAGE, 0), "skip": Tokens(IMAGE)},
                attends=IMAGE,
                within={"attn2": "local"},
                whole=("c", "text_states"),
                gives=("x",),
                aside=True,  # what a block leaves for later cannot be skipped
            ),
            Site("final_layer", {"x": Whole(IMAGE)}),
        ),
        residuals=("output",),
        no_options=("comfy.ldm.hydit.attn_layers",),
    ),
)
