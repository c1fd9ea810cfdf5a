"""Chroma: FLUX's blocks, with modulation from a layer of its own. Radiance has them on patches of pixels; its decoder
of pixels runs whole on every rank."""

from dataclasses import replace

from ..plan import IMAGE, TEXT, Along, Plan, Site, Tokens, Whole
from .network import Network, inputs_of

BOTH = TEXT + IMAGE

PLAN = Plan(
    (
        Site(
            "double_blocks",
            {"img": Tokens(IMAGE), "txt": Tokens(TEXT), "pe": Along(BOTH, 2)},
            attends=BOTH,
            whole=("vec", "attn_mask"),
        ),
        Site("single_blocks", {"x": Tokens(BOTH), "pe": Along(BOTH, 2)}, attends=BOTH, whole=("vec", "attn_mask")),
        Site("final_layer", {"x": Whole(IMAGE)}),
    )
)

NETWORK = Network(
    name="Chroma",
    kinds=("comfy.ldm.chroma.model:Chroma",),
    plan=PLAN,
    text_width=inputs_of("txt_in"),
)

RADIANCE = replace(
    NETWORK,
    name="Chroma Radiance",
    kinds=("comfy.ldm.chroma_radiance.model:ChromaRadiance",),
    plan=Plan(tuple(replace(site, gathers=True) for site in PLAN.sites if site.carries)),
)
