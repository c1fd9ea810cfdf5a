"""PixelDiT and PiD: patches with the text; then blocks of pixels, which run whole on every rank.

PiD mixes what it knows of the small picture into the patches between blocks, by modules of its own.
"""

from ..plan import IMAGE, TEXT, Along, Plan, Site, Tokens
from .network import Network, inputs_of

BLOCKS = Site(
    "patch_blocks",
    {"x": Tokens(IMAGE), "y": Tokens(TEXT), "pos_img": Along(IMAGE, 0), "pos_txt": Along(TEXT, 0)},
    attends=TEXT + IMAGE,
    whole=("c", "attn_mask"),
    gathers=True,
)
GATES = Site("lq_proj.gate_modules", {"x": Tokens(IMAGE), "lq": Along(IMAGE)}, whole=("sigma",), aside=True, gives=())


def pixels(name: str, kind: str, *sites: Site) -> Network:
    return Network(
        name=name,
        kinds=(f"comfy.ldm.pixeldit.{kind}",),
        plan=Plan((*sites, BLOCKS)),
        text_width=inputs_of("y_embedder.proj"),
    )


PIXELDIT = pixels("PixelDiT", "model:PixDiT_T2I")
PID = pixels("PiD", "pid:PidNet", GATES)
