"""Ideogram 4: text and image in one stream, or the image alone."""

from .architecture import Architecture, inputs_of
from .split_plan import JOINT, Gather, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "layers",
    {"x": Split(JOINT), "freqs_cis": SplitLike(JOINT), "adaln_input": SplitLike(JOINT)},
    attends=JOINT,
    unsplit_args=("attn_mask",),
)
LAST = ModulePlan("final_layer", {"x": Gather(JOINT, after=True), "c": SplitLike(JOINT)})
NETWORK = Architecture(
    name="Ideogram 4",
    kinds=("comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel",),
    plan=SplitPlan((BLOCKS, LAST)),
    width=lambda net: net.input_proj.out_features,
    text_width=inputs_of("llm_cond_proj"),
    patch=(1, 1, 1),
)
