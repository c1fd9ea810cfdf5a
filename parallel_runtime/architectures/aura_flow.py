"""AuraFlow. The parent slices the text off right before its last layer."""

from .architecture import Architecture, inputs_of
from .split_plan import IMAGE, TEXT, Gather, ModulePlan, Split, SplitPlan

BOTH = TEXT + IMAGE
DOUBLE = ModulePlan("double_layers", {"c": Split(TEXT), "x": Split(IMAGE)}, attends=BOTH, unsplit_args=("global_cond",))
SINGLE = ModulePlan("single_layers", {"cx": Split(BOTH)}, attends=BOTH, unsplit_args=("global_cond",))

NETWORK = Architecture(
    name="AuraFlow",
    kinds=("comfy.ldm.aura.mmdit:MMDiT",),
    plan=SplitPlan((DOUBLE, SINGLE, ModulePlan("final_linear", {0: Gather(IMAGE, after=True)}))),
    width=lambda net: net.final_linear.in_features,
    text_width=inputs_of("cond_seq_linear"),
)
