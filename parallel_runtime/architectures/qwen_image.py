"""Qwen-Image, Edit, 2509 and 2511, and Mage-Flow, which has its blocks."""

from dataclasses import replace

from .architecture import Architecture, inputs_of
from .split_plan import IMAGE, TEXT, Gather, Index, ModulePlan, Split, SplitLike, SplitPlan

BOTH = TEXT + IMAGE
BLOCKS = ModulePlan(
    "transformer_blocks",
    {
        "encoder_hidden_states": Split(TEXT),
        "hidden_states": Split(IMAGE),
        "encoder_hidden_states_mask": SplitLike(TEXT),
        "image_rotary_emb": SplitLike(BOTH, 2),
        "timestep_zero_index": Index("image"),
    },
    attends=BOTH,
    unsplit_args=("temb",),
)
PLAN = SplitPlan((BLOCKS, ModulePlan("proj_out", {0: Gather(IMAGE, after=True)})))

NETWORK = Architecture(
    name="Qwen-Image",
    kinds=("comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",),
    plan=PLAN,
    text_width=inputs_of("txt_in"),
)
MAGE_FLOW = replace(NETWORK, name="Mage-Flow", kinds=("comfy.ldm.mage_flow.model:MageFlowTransformer2DModel",))
