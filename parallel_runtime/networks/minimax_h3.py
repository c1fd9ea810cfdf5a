"""MiniMax H3: text, conditions, audio and video in one stream of tokens without a batch."""

from ..plan import JOINT, Along, Plan, Site, Slices, Tokens, Whole
from .network import Network

NETWORK = Network(
    name="MiniMax H3",
    kinds=("comfy.ldm.minimax.model:MiniMaxH3Model",),
    plan=Plan(
        (
            Site(
                "blocks",
                {"x": Tokens(JOINT, dim=0), "mod_segments": Slices(JOINT), "rope_freqs": Along(JOINT)},
                attends=JOINT,
                whole=("t_emb",),
            ),
            Site("final_layer", {"x": Whole(JOINT, dim=0)}),
        ),
    ),
    width=lambda net: net.blocks[0].attn.heads * net.blocks[0].attn.head_dim,
)
