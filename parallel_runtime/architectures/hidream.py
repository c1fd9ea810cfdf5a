"""HiDream I1. Each block gets another text beside what it kept of the last: the text stays full, and is attended to
in shares."""

from .architecture import Architecture
from .split_plan import IMAGE, TEXT, Gather, ModulePlan, Split, SplitLike, SplitPlan

BOTH = IMAGE + TEXT
DOUBLE = ModulePlan(
    "double_stream_blocks",
    {"image_tokens": Split(IMAGE), "text_tokens": Split(TEXT), "rope": SplitLike(BOTH)},
    attends=BOTH,
    unsplit_args=("adaln_input",),
)
SINGLE = ModulePlan(
    "single_stream_blocks",
    {"image_tokens": Split(BOTH), "rope": SplitLike(BOTH)},
    attends=BOTH,
    unsplit_args=("adaln_input",),
)
LAST = ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("vec",))
NETWORK = Architecture(
    name="HiDream I1",
    kinds=("comfy.ldm.hidream.model:HiDreamImageTransformer2DModel",),
    plan=SplitPlan((DOUBLE, SINGLE, LAST), replicated=frozenset(TEXT)),
)
