"""Z-Image on patches of pixels. The parent slices the text off right after the blocks; its decoder of pixels runs whole
on every rank."""

from dataclasses import replace

from ..plan import Plan
from . import lumina
from .network import Network, joint, layers

NETWORK = Network(
    name="Z-Image in pixels",
    kinds=("comfy.ldm.lumina.model:NextDiTPixelSpace",),
    plan=Plan(tuple(replace(site, gathers=True) for site in lumina.PLAN.sites if site.carries), main="joint"),
    heads=lambda net: net.n_heads,
    width=lambda net: net.dim,
    layers=layers("noise_refiner", "layers"),
    tokens=lambda net, *sizes: joint(net.patch_size)(net, *sizes),
    padded=lambda net: net.patch_size,
)
