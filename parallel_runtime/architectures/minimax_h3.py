"""MiniMax H3: text, conditions, audio and video in one stream of tokens without a batch."""

from collections.abc import Callable
from typing import Any

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


def _split_range(value: Any, split: Callable[[Any, Any], Any]) -> Any:
    return split([value], Slices(JOINT))[0]


LAST = ModulePlan(
    "final_layer",
    {
        "x": Gather(JOINT, dim=0, after=True, ranges=("video_seg", "audio_seg")),
        "video_seg": _split_range,
        "audio_seg": _split_range,
    },
    unsplit_args=("t_emb",),
)
NETWORK = Architecture(
    name="MiniMax H3",
    kinds=("comfy.ldm.minimax.model:MiniMaxH3Model",),
    plan=SplitPlan((BLOCKS, LAST)),
    width=lambda net: net.blocks[0].attn.heads * net.blocks[0].attn.head_dim,
)
