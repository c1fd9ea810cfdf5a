"""ERNIE-Image: image and text in one stream. Its attention is called without transformer_options."""

from .architecture import Architecture
from .split_plan import JOINT, Gather, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "layers", {"x": Split(JOINT), "rotary_pos_emb": SplitLike(JOINT)}, attends=JOINT, unsplit_args=("temb",)
)
NETWORK = Architecture(
    name="ERNIE-Image",
    kinds=("comfy.ldm.ernie.model:ErnieImageModel",),
    plan=SplitPlan(
        (BLOCKS, ModulePlan("final_linear", {0: Gather(JOINT, after=True)})), no_options=("comfy.ldm.ernie.model",)
    ),
)
