"""FLUX.1 (dev, schnell, Fill, depth, canny, Kontext, USO) and FLUX.2 (dev, klein): one class, one plan. Others have its
blocks: Chroma, Chroma Radiance on patches of pixels, whose decoder of pixels runs in full on every rank, and
Hunyuan 3D 2, without positions and with points of a shape in place of pixels."""

from dataclasses import replace

from .architecture import Architecture, inputs_of
from .split_plan import IMAGE, TEXT, Gather, ModulePlan, Slices, Split, SplitLike, SplitPlan

BOTH = TEXT + IMAGE
DOUBLE = ModulePlan(
    "double_blocks",
    {"img": Split(IMAGE), "txt": Split(TEXT), "pe": SplitLike(BOTH, 2), "modulation_dims_img": Slices(IMAGE)},
    attends=BOTH,
    unsplit_args=("vec", "attn_mask"),
)
SINGLE = ModulePlan(
    "single_blocks",
    {"x": Split(BOTH), "pe": SplitLike(BOTH, 2), "modulation_dims": Slices(IMAGE, after=TEXT)},
    attends=BOTH,
    unsplit_args=("vec", "attn_mask"),
)
# Tokens stay split between the two stacks, so that residuals, which are added between blocks, fit.
LAST = ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("vec",))
ZERO_TIME = {**LAST.args, "modulation_dims": Slices(IMAGE)}
PLAN = SplitPlan((DOUBLE, SINGLE, replace(LAST, args=ZERO_TIME)))

FLUX = Architecture(
    name="FLUX",
    kinds=("comfy.ldm.flux.model:Flux",),
    plan=PLAN,
    text_width=inputs_of("txt_in"),
    pooled_width=inputs_of("vector_in.in_layer"),
)
CHROMA = Architecture(
    name="Chroma",
    kinds=("comfy.ldm.chroma.model:Chroma",),
    plan=SplitPlan((DOUBLE, SINGLE, LAST)),
    text_width=inputs_of("txt_in"),
)
RADIANCE = replace(
    CHROMA,
    name="Chroma Radiance",
    kinds=("comfy.ldm.chroma_radiance.model:ChromaRadiance",),
    plan=SplitPlan((replace(DOUBLE, gathers=True), replace(SINGLE, gathers=True))),
)
HUNYUAN_3D_2 = Architecture(
    name="Hunyuan 3D 2",
    kinds=("comfy.ldm.hunyuan3d.model:Hunyuan3Dv2",),
    plan=PLAN,
    patch=(1,),
    width=lambda net: net.double_blocks[0].hidden_size,
    text_width=inputs_of("cond_in"),
)
