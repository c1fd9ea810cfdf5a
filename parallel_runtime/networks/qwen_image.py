"""Qwen-Image, Edit, 2509 and 2511, and Mage-Flow, which has its blocks."""

from dataclasses import replace

from ..plan import IMAGE, TEXT, Along, Index, Plan, Site, Tokens, Whole
from .network import Network, inputs_of

BOTH = TEXT + IMAGE

PLAN = Plan(
    (
        Site(
            "transformer_blocks",
            {
                "encoder_hidden_states": Tokens(TEXT),
                "hidden_states": Tokens(IMAGE),
                "encoder_hidden_states_mask": Along(TEXT),
                "image_rotary_emb": Along(BOTH, 2),
                "timestep_zero_index": Index("image"),
            },
            attends=BOTH,
            whole=("temb",),
        ),
        Site("norm_out", {"x": Whole(IMAGE)}),
    )
)

NETWORK = Network(
    name="Qwen-Image",
    kinds=("comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",),
    plan=PLAN,
    text_width=inputs_of("txt_in"),
)

MAGE_FLOW = replace(NETWORK, name="Mage-Flow", kinds=("comfy.ldm.mage_flow.model:MageFlowTransformer2DModel",))
