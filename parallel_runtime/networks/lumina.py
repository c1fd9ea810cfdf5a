"""Lumina 2 and Z-Image: text and image in one stream, after a refiner of the image alone.

Z-Image on patches of pixels slices the text off right after the blocks; its decoder of pixels runs whole on every rank.
"""

from dataclasses import replace

from ..plan import IMAGE, JOINT, Along, Plan, Site, Slices, Tokens, Whole
from .network import Network

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
)

NETWORK = Network(
    name="Lumina 2 or Z-Image",
    kinds=("comfy.ldm.lumina.model:NextDiT",),
    plan=PLAN,
    padded=lambda net: net.patch_size,
)

PIXELS = replace(
    NETWORK,
    name="Z-Image in pixels",
    kinds=("comfy.ldm.lumina.model:NextDiTPixelSpace",),
    plan=Plan(tuple(replace(site, gathers=True) for site in PLAN.sites if site.carries)),
)
