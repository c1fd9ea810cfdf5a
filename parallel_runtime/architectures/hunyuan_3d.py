"""Hunyuan 3D 2 and 2.1: points of a shape in place of pixels. 2 is FLUX without positions. 2.1 has the time in front of
its points; the second half of its blocks is given what the first half left, and the picture is read as keys only."""

from .architecture import Architecture, inputs_of
from .flux import PLAN
from .split_plan import Gather, ModulePlan, Split, SplitPlan

POINTS = ("points",)

V2 = Architecture(
    name="Hunyuan 3D 2",
    kinds=("comfy.ldm.hunyuan3d.model:Hunyuan3Dv2",),
    plan=PLAN,
    patch=(1,),
    width=lambda net: net.double_blocks[0].hidden_size,
    text_width=inputs_of("cond_in"),
)
V2_1 = Architecture(
    name="Hunyuan 3D 2.1",
    kinds=("comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain",),
    plan=SplitPlan(
        (
            ModulePlan(
                "blocks",
                {"hidden_states": Split(POINTS), "skip_tensor": Split(POINTS)},
                attends=POINTS,
                submodule_attends={"attn2": "local"},
                unsplit_args=("conditioning", "text_states"),
                updates=("hidden_states",),
                never_skipped=True,  # what a block leaves for later cannot be skipped
            ),
            ModulePlan("final_layer", {"x": Gather(POINTS)}),
        ),
        no_options=("comfy.ldm.hunyuan3dv2_1.hunyuandit",),
    ),
    patch=(1,),
    text_width=inputs_of("blocks.0.attn2.to_k"),
    batch_coupled=lambda net: True,  # of two rows and more it trades the halves
)
