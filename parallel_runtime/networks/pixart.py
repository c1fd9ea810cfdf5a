"""PixArt alpha and sigma. The text is read as keys only. Its attention is called without transformer_options."""

from ..plan import Plan, Site, Tokens, Whole
from .network import Network, image, layers

IMAGE = ("image",)

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
    layers=layers("blocks"),
    tokens=image(2, text=False),
)
