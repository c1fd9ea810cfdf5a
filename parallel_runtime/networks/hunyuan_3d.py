"""Hunyuan 3D 2 and 2.1: points of a shape in place of pixels. 2 is FLUX without positions. 2.1 has the time in front of
its points; the second half of its blocks is given what the first half left, and the picture is read as keys only."""

from ..plan import Plan, Site, Tokens, Whole
from .flux import PLAN
from .network import Network, inputs_of

POINTS = ("points",)

V2 = Network(
    name="Hunyuan 3D 2",
    kinds=("comfy.ldm.hunyuan3d.model:Hunyuan3Dv2",),
    plan=PLAN,
    patch=(1,),
    width=lambda net: net.double_blocks[0].hidden_size,
    text_width=inputs_of("cond_in"),
)
V2_1 = Network(
    name="Hunyuan 3D 2.1",
    kinds=("comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain",),
    plan=Plan(
        (
            Site(
                "blocks",
                {"hidden_states": Tokens(POINTS), "skip_tensor": Tokens(POINTS)},
                attends=POINTS,
                within={"attn2": "local"},
                whole=("conditioning", "text_states"),
                gives=("hidden_states",),
                aside=True,  # what a block leaves for later cannot be skipped
            ),
            Site("final_layer", {"x": Whole(POINTS)}),
        ),
        no_options=("comfy.ldm.hunyuan3dv2_1.hunyuandit",),
    ),
    patch=(1,),
    text_width=inputs_of("blocks.0.attn2.to_k"),
    together=True,  # of two rows and more it trades the halves
)
