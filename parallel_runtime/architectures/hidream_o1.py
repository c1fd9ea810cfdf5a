"""HiDream O1: a language model that makes pictures. What comes before the picture is full on every rank and attends to
nothing behind it; it is left out where the layers kept its keys at an earlier step.
"""

from .architecture import Architecture
from .split_plan import IMAGE, Count, Cross, ModulePlan, Split, SplitLike, SplitPlan

PREFIX = ("prefix",)
ALL = PREFIX + IMAGE
LENGTHS = ModulePlan("", {"ar_len": Count(PREFIX), "position_ids": Count(ALL)})
LAYERS = ModulePlan(
    "language_model.layers",
    {"x": [Split(ALL), Split(IMAGE)], "freqs_cis": [SplitLike(ALL, -2), SplitLike(IMAGE, -2)]},
    attends=Cross(queries=IMAGE, keys=ALL),
    unsplit_args=("attention_mask", "optimized_attention", "past_key_value"),
    gathers=True,
    never_skipped=True,  # layers return their keys too
    updates=(),  # and keep them from step to step
)
NETWORK = Architecture(
    name="HiDream O1",
    kinds=("comfy.ldm.hidream_o1.model:HiDreamO1Transformer",),
    plan=SplitPlan((LENGTHS, LAYERS), replicated=frozenset(PREFIX)),
    width=lambda net: net.text_config.num_attention_heads * net.text_config.head_dim,
    prompt="prefix",
)
