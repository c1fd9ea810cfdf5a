"""Chroma: FLUX's blocks, with modulation from a layer of its own. Radiance has them on patches of pixels; its decoder
of pixels runs in full on every rank."""

from dataclasses import replace

from .architecture import Architecture, inputs_of
from .flux import PLAN
from .split_plan import SplitPlan

NETWORK = Architecture(
    name="Chroma", kinds=("comfy.ldm.chroma.model:Chroma",), plan=PLAN, text_width=inputs_of("txt_in")
)

RADIANCE = replace(
    NETWORK,
    name="Chroma Radiance",
    kinds=("comfy.ldm.chroma_radiance.model:ChromaRadiance",),
    plan=SplitPlan(
        tuple(replace(module_plan, gathers=True) for module_plan in PLAN.module_plans if module_plan.split_args)
    ),
)
