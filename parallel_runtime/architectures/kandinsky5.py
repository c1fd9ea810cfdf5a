"""Kandinsky 5 (image and video). The text has blocks of its own, full on every rank."""

from .architecture import Architecture
from .split_plan import VIDEO, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "visual_transformer_blocks",
    {"visual_embed": Split(VIDEO), "freqs": SplitLike(VIDEO)},
    attends=VIDEO,
    submodule_attends={"cross_attention": "local"},
    unsplit_args=("text_embed", "time_embed"),
    gathers=True,
)
NETWORK = Architecture(name="Kandinsky 5", kinds=("comfy.ldm.kandinsky5.model:Kandinsky5",), plan=SplitPlan((BLOCKS,)))
