"""PixArt alpha and sigma. The text is read as keys only. Its attention is called without transformer_options."""

from ..plan import IMAGE, Plan, Site, Tokens, Whole
from .network import Network

NETWORK = Network(
    name="PixArt",
    kinds=("comfy.ldm.pixart.pixartms:PixArtMS",),
    plan=Plan(
        (
            Site(
                "blocks",
                {"x": Tokens(IMAGE)},
                attends=IMAGE,
                within={"cross_attn": "local"},
                whole=("y", "t", "mask", "HW"),
            ),
            Site("final_layer", {"x": Whole(IMAGE)}),
        ),
        no_options=("comfy.ldm.pixart.blocks",),
    ),
)
