"""HunyuanVideo (text and both image to video), HunyuanVideo 1.5 and HunyuanImage, which have no single blocks or do.

After the blocks the parent slices reference latents off by whole positions, so each stack ends full.
"""

from .architecture import Architecture
from .split_plan import IMAGE, TEXT, ModulePlan, Slices, Split, SplitLike, SplitPlan

BOTH = TEXT + IMAGE
DOUBLE = ModulePlan(
    "double_blocks",
    {
        "img": Split(IMAGE),
        "txt": Split(TEXT),
        "pe": SplitLike(BOTH, 2),
        "modulation_dims_img": Slices(IMAGE),
        "modulation_dims_txt": Slices(TEXT),
    },
    attends=BOTH,
    unsplit_args=("vec", "attn_mask"),
    gathers=True,
)
# The image's slices are applied to text and image: that is how ComfyUI does it.
SINGLE = ModulePlan(
    "single_blocks",
    {"x": Split(BOTH), "pe": SplitLike(BOTH, 2), "modulation_dims": Slices(BOTH)},
    attends=BOTH,
    unsplit_args=("vec", "attn_mask"),
    gathers=True,
)
NETWORK = Architecture(
    name="HunyuanVideo",
    kinds=("comfy.ldm.hunyuan_video.model:HunyuanVideo",),
    plan=SplitPlan((DOUBLE, SINGLE), residuals=("input",)),
)
