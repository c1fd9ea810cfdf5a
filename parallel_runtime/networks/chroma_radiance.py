"""Chroma Radiance: Chroma's blocks on patches of pixels. Its decoder of pixels runs whole on every rank."""

from dataclasses import replace

from ..plan import Plan
from . import chroma
from .network import Network, inputs_of, layers, patches

NETWORK = Network(
    name="Chroma Radiance",
    kinds=("comfy.ldm.chroma_radiance.model:ChromaRadiance",),
    plan=Plan(tuple(replace(site, gathers=True) for site in chroma.PLAN.sites if site.carries)),
    text_width=inputs_of("txt_in"),
    layers=layers("double_blocks", "single_blocks"),
    tokens=lambda net, *sizes: patches((net.patch_size, net.patch_size), text=True, stream="image")(net, *sizes),
)
