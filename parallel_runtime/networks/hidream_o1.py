"""HiDream O1: a language model that paints. What comes before the picture is whole on every rank and attends to nothing
behind it; it is left out where the layers kept its keys at an earlier step.
"""

from ..plan import IMAGE, Along, Count, Cross, Plan, Site, Tokens
from .network import Network

PREFIX = ("prefix",)
ALL = PREFIX + IMAGE
POSITIONS = [Along(ALL, -2), Along(IMAGE, -2)]

NETWORK = Network(
    name="HiDream O1",
    kinds=("comfy.ldm.hidream_o1.model:HiDreamO1Transformer",),
    plan=Plan(
        (
            Site("", {"ar_len": Count(PREFIX), "position_ids": Count(ALL)}),
            Site(
                "language_model.layers",
                {"x": [Tokens(ALL), Tokens(IMAGE)], "freqs_cis": POSITIONS},
                attends=Cross(queries=IMAGE, keys=ALL),
                whole=("attention_mask", "optimized_attention", "past_key_value"),
                gathers=True,
                aside=True,  # layers return their keys too
                gives=(),  # and keep them from step to step
            ),
        ),
        replicated=frozenset(PREFIX),
    ),
    width=lambda net: net.text_config.num_attention_heads * net.text_config.head_dim,
    prompt="prefix",
)
