"""HiDream I1. Each block gets another text beside what it kept of the last: the text stays whole, and is attended to
in shares."""

from ..plan import IMAGE, TEXT, Along, Plan, Site, Tokens, Whole
from .network import Network

BOTH = IMAGE + TEXT

PLAN = Plan(
    (
        Site(
            "double_stream_blocks",
            {"image_tokens": Tokens(IMAGE), "text_tokens": Tokens(TEXT), "rope": Along(BOTH)},
            attends=BOTH,
            whole=("adaln_input",),
        ),
        Site(
            "single_stream_blocks",
            {"image_tokens": Tokens(BOTH), "rope": Along(BOTH)},
            attends=BOTH,
            whole=("adaln_input",),
        ),
        Site("final_layer", {"x": Whole(IMAGE)}),
    ),
    replicated=frozenset(TEXT),
)

NETWORK = Network(
    name="HiDream I1",
    kinds=("comfy.ldm.hidream.model:HiDreamImageTransformer2DModel",),
    plan=PLAN,
)
