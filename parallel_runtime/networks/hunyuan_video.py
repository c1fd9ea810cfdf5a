"""HunyuanVideo (text and both image to video), HunyuanVideo 1.5 and HunyuanImage, which have no single blocks or do.

After the blocks the parent slices reference latents off by whole positions, so each stack ends whole.
"""

from ..plan import IMAGE, TEXT, Along, Plan, Site, Slices, Tokens
from .network import Network

BOTH = TEXT + IMAGE
WHOLE = ("vec", "attn_mask")

PLAN = Plan(
    (
        Site(
            "double_blocks",
            {
                "img": Tokens(IMAGE),
                "txt": Tokens(TEXT),
                "pe": Along(BOTH, 2),
                "modulation_dims_img": Slices(IMAGE),
                "modulation_dims_txt": Slices(TEXT),
            },
            attends=BOTH,
            whole=WHOLE,
            gathers=True,
        ),
        # The image's slices are applied to text and image: that is how ComfyUI does it.
        Site(
            "single_blocks",
            {"x": Tokens(BOTH), "pe": Along(BOTH, 2), "modulation_dims": Slices(BOTH)},
            attends=BOTH,
            whole=WHOLE,
            gathers=True,
        ),
    ),
    residuals=("input",),
)

NETWORK = Network(
    name="HunyuanVideo",
    kinds=("comfy.ldm.hunyuan_video.model:HunyuanVideo",),
    plan=PLAN,
)
