"""PixelDiT and PiD: patches with the text; then blocks of pixels, which run in full on every rank.

PiD mixes what it knows of the small picture into the patches between blocks, by modules of its own.
"""

from dataclasses import replace

from .architecture import Architecture, inputs_of
from .split_plan import IMAGE, TEXT, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "patch_blocks",
    {"x": Split(IMAGE), "y": Split(TEXT), "pos_img": SplitLike(IMAGE, 0), "pos_txt": SplitLike(TEXT, 0)},
    attends=TEXT + IMAGE,
    unsplit_args=("c", "attn_mask"),
    gathers=True,
)
PIXELDIT = Architecture(
    name="PixelDiT",
    kinds=("comfy.ldm.pixeldit.model:PixDiT_T2I",),
    plan=SplitPlan((BLOCKS,)),
    text_width=inputs_of("y_embedder.proj"),
)

GATES = ModulePlan(
    "lq_proj.gate_modules",
    {"x": Split(IMAGE), "lq": SplitLike(IMAGE)},
    unsplit_args=("sigma",),
    never_skipped=True,
    updates=(),
)
PID = replace(PIXELDIT, name="PiD", kinds=("comfy.ldm.pixeldit.pid:PidNet",), plan=SplitPlan((GATES, BLOCKS)))
