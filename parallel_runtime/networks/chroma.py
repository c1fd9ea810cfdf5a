"""Chroma: FLUX's blocks, with modulation from a layer of its own. Radiance has them on patches of pixels; its decoder
of pixels runs whole on every rank."""

from dataclasses import replace

from ..plan import Plan
from .flux import PLAN
from .network import Network, inputs_of

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
