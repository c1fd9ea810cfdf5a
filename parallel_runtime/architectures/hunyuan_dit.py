"""Hunyuan DiT, and Hunyuan 3D 2.1 with points of a shape in place of pixels, and the time in front of them. The second
half of the blocks is given what the first half left. The text, or the picture, is read as keys only."""

from .architecture import Architecture, inputs_of
from .split_plan import IMAGE, Gather, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(IMAGE), "freq_cis_img": SplitLike(IMAGE, 0), "skip": Split(IMAGE)},
    attends=IMAGE,
    submodule_attends={"attn2": "local"},
    unsplit_args=("c", "text_states"),
    updates=("x",),
    never_skipped=True,  # what a block leaves for later cannot be skipped
)
PLAN = SplitPlan(
    (BLOCKS, ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("c",))),
    residuals=("output",),
    no_options=("comfy.ldm.hydit.attn_layers",),
)
NETWORK = Architecture(name="Hunyuan DiT", kinds=("comfy.ldm.hydit.models:HunYuanDiT",), plan=PLAN)

POINTS = ("points",)
POINT_BLOCKS = ModulePlan(
    "blocks",
    {"hidden_states": Split(POINTS), "skip_tensor": Split(POINTS)},
    attends=POINTS,
    submodule_attends={"attn2": "local"},
    unsplit_args=("conditioning", "text_states"),
    updates=("hidden_states",),
    never_skipped=True,
)
HUNYUAN_3D_2_1 = Architecture(
    name="Hunyuan 3D 2.1",
    kinds=("comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain",),
    plan=SplitPlan(
        (POINT_BLOCKS, ModulePlan("final_layer", {"x": Gather(POINTS)})),
        no_options=("comfy.ldm.hunyuan3dv2_1.hunyuandit",),
    ),
    patch=(1,),
    text_width=inputs_of("blocks.0.attn2.to_k"),
    batch_coupled=lambda net: True,  # it swaps the halves of a batch of two and more
)
