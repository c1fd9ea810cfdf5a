"""JoyImage. The parent slices references off right after the blocks, so they end full."""

from .architecture import Architecture
from .split_plan import IMAGE, TEXT, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "double_blocks",
    {"hidden_states": Split(IMAGE), "encoder_hidden_states": Split(TEXT), "image_rotary_emb": SplitLike(IMAGE)},
    attends=IMAGE + TEXT,
    unsplit_args=("temb",),
    gathers=True,
)
NETWORK = Architecture(
    name="JoyImage",
    kinds=("comfy.ldm.joyimage.model:JoyImageTransformer3DModel",),
    plan=SplitPlan((BLOCKS,)),
    width=lambda net: net.img_in.out_channels,
)
