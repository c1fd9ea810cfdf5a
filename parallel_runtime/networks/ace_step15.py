"""ACE-Step 1.5. Half of its layers attend in a window. Its attention is called without transformer_options."""

from ..plan import AUDIO, Along, Plan, Site, Tokens, Window
from .network import Network

NETWORK = Network(
    name="ACE-Step 1.5",
    kinds=("comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel",),
    plan=Plan(
        (
            Site(
                "decoder.layers",
                {"hidden_states": Tokens(AUDIO), "position_embeddings": Along(AUDIO, -2)},
                within={"self_attn": Window(streams=AUDIO, width="sliding_window"), "cross_attn": "local"},
                whole=("temb", "encoder_hidden_states"),
                gathers=True,
            ),
        ),
        no_options=("comfy.ldm.ace.ace_step15",),
    ),
    width=lambda net: net.decoder.layers[0].self_attn.num_heads * net.decoder.layers[0].self_attn.head_dim,
    patch=lambda net: (net.decoder.patch_size,),
)
