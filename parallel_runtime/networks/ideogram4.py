"""Ideogram 4: text and image in one stream, or the image alone."""

from ..plan import JOINT, Along, Plan, Site, Tokens, Whole
from .network import Network, inputs_of

NETWORK = Network(
    name="Ideogram 4",
    kinds=("comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel",),
    plan=Plan(
        (
            Site(
                "layers",
                {"x": Tokens(JOINT), "freqs_cis": Along(JOINT), "adaln_input": Along(JOINT)},
                attends=JOINT,
                whole=("attn_mask",),
            ),
            Site("final_layer", {"x": Whole(JOINT)}),
        ),
    ),
    width=lambda net: net.input_proj.out_features,
    text_width=inputs_of("llm_cond_proj"),
    patch=(1, 1, 1),
)
