"""Mochi. Of the text, which is full on every rank, only the first tokens are attended to: the prompt's."""

from .architecture import Architecture
from .split_plan import TEXT, VIDEO, Count, Gather, ModulePlan, Split, SplitLike, SplitPlan

PROMPT = ("prompt",)
BLOCKS = ModulePlan(
    "blocks",
    {
        "x": Split(VIDEO),
        "y": Split(TEXT),
        "rope_cos": SplitLike(VIDEO, 0),
        "rope_sin": SplitLike(VIDEO, 0),
        "crop_y": Count(PROMPT),
    },
    attends=VIDEO + PROMPT,
    unsplit_args=("c",),
)
LAST = ModulePlan("final_layer", {"x": Gather(VIDEO, after=True)}, unsplit_args=("c",))
NETWORK = Architecture(
    name="Mochi",
    kinds=("comfy.ldm.genmo.joint_model.asymm_models_joint:AsymmDiTJoint",),
    plan=SplitPlan((BLOCKS, LAST), replicated=frozenset(TEXT + PROMPT)),
    width=lambda net: net.hidden_size_x,
)
