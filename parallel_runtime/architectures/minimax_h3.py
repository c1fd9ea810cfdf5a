"""MiniMax H3: text, conditions, audio and video in one stream of tokens without a batch."""

from .architecture import Architecture
from .split_plan import JOINT, Gather, HeadProducer, ModulePlan, Slices, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(JOINT, dim=0), "mod_segments": Slices(JOINT), "rope_freqs": SplitLike(JOINT)},
    attends=JOINT,
    head_producers={
        "attention": HeadProducer(
            module="attn", qkv="qkv_proj", out="out_proj", gate="to_gate_compress", full="rope_freqs"
        )
    },
    unsplit_args=("t_emb",),
)
NETWORK = Architecture(
    name="MiniMax H3",
    kinds=("comfy.ldm.minimax.model:MiniMaxH3Model",),
    plan=SplitPlan((BLOCKS, ModulePlan("final_layer", {"x": Gather(JOINT, dim=0)}))),
    width=lambda net: net.blocks[0].attn.heads * net.blocks[0].attn.head_dim,
)
