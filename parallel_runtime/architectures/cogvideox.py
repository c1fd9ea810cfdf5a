"""CogVideoX."""

from .architecture import Architecture
from .split_plan import TEXT, VIDEO, Gather, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "blocks",
    {"hidden_states": Split(VIDEO), "encoder_hidden_states": Split(TEXT), "image_rotary_emb": SplitLike(VIDEO, -2)},
    attends=TEXT + VIDEO,
    unsplit_args=("temb",),
)
NETWORK = Architecture(
    name="CogVideoX",
    kinds=("comfy.ldm.cogvideo.model:CogVideoXTransformer3DModel",),
    plan=SplitPlan((BLOCKS, ModulePlan("proj_out", {0: Gather(VIDEO, after=True)}))),
)
