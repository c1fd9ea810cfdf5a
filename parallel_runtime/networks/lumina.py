"""Lumina 2 and Z-Image: text and image in one stream, after a refiner of the image alone."""

from ..plan import Along, Plan, Site, Slices, Tokens, Whole
from .network import Network, joint, layers

IMAGE, JOINT = ("image",), ("joint",)

PLAN = Plan(
    (
        Site(
            "noise_refiner",
            {"x": Tokens(IMAGE), "freqs_cis": Along(IMAGE), "timestep_zero_index": Slices(IMAGE)},
            attends=IMAGE,
            whole=("adaln_input",),
            gathers=True,
            aside=True,
        ),
        Site(
            "layers",
            {"x": Tokens(JOINT), "freqs_cis": Along(JOINT), "timestep_zero_index": Slices(JOINT)},
            attends=JOINT,
            whole=("adaln_input",),
        ),
        Site("final_layer", {"x": Whole(JOINT)}),
    ),
    main="joint",
)

NETWORK = Network(
    name="Lumina 2 or Z-Image",
    kinds=("comfy.ldm.lumina.model:NextDiT",),
    plan=PLAN,
    heads=lambda net: net.n_heads,
    width=lambda net: net.dim,
    layers=layers("noise_refiner", "layers"),
    tokens=joint(2),
)
