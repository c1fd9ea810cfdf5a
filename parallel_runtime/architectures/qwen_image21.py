"""Qwen-Image 2.1: text, references and image in one stream. Blocks are given a function that attends, by segments, and
may keep keys of all that comes before the image: then these tokens go through each block first, the image's after them.
"""

from .architecture import Architecture, inputs_of
from .split_plan import JOINT, HeadFunction, Index, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "transformer_blocks",
    {"x": Split(JOINT), "pe": SplitLike(JOINT), "prefix_len": Index("joint")},
    head_functions={"attn_fn": HeadFunction()},
    unsplit_args=("mod",),
    gathers=True,
    never_skipped=True,
    updates=(),  # each stage would need the keys that are kept
)
NETWORK = Architecture(
    name="Qwen-Image 2.1",
    kinds=("comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel",),
    plan=SplitPlan((BLOCKS,), in_turns=JOINT, agreed=("select_prefix_cache",)),
    patch=(1, 1),
    text_width=inputs_of("txt_in.in_layer"),
)
