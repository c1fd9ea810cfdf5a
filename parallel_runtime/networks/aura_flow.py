"""AuraFlow. The parent slices the text off right before its last layer."""

from ..plan import IMAGE, TEXT, Plan, Site, Tokens, Whole
from .network import Network, inputs_of

BOTH = TEXT + IMAGE

NETWORK = Network(
    name="AuraFlow",
    kinds=("comfy.ldm.aura.mmdit:MMDiT",),
    plan=Plan(
        (
            Site("double_layers", {"c": Tokens(TEXT), "x": Tokens(IMAGE)}, attends=BOTH, whole=("global_cond",)),
            Site("single_layers", {"cx": Tokens(BOTH)}, attends=BOTH, whole=("global_cond",)),
            Site("final_linear", {0: Whole(IMAGE)}),
        )
    ),
    width=lambda net: net.final_linear.in_features,
    text_width=inputs_of("cond_seq_linear"),
)
