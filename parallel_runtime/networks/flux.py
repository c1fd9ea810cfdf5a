"""FLUX.1 (dev, schnell, Fill, depth, canny, Kontext, USO) and FLUX.2 (dev, klein): one class, one plan."""

from ..plan import IMAGE, TEXT, Along, Plan, Site, Slices, Tokens, Whole
from .network import Network, inputs_of

BOTH = TEXT + IMAGE

# It stays cut between the two stacks, so that residuals, which are added between blocks, fit.
PLAN = Plan(
    (
        Site(
            "double_blocks",
            {
                "img": Tokens(IMAGE),
                "txt": Tokens(TEXT),
                "pe": Along(BOTH, 2),
                "modulation_dims_img": Slices(IMAGE),
            },
            attends=BOTH,
            whole=("vec", "attn_mask"),
        ),
        Site(
            "single_blocks",
            {"x": Tokens(BOTH), "pe": Along(BOTH, 2), "modulation_dims": Slices(IMAGE, after=TEXT)},
            attends=BOTH,
            whole=("vec", "attn_mask"),
        ),
        Site("final_layer", {"x": Whole(IMAGE)}),
    )
)

NETWORK = Network(
    name="FLUX",
    kinds=("comfy.ldm.flux.model:Flux",),
    plan=PLAN,
    text_width=inputs_of("txt_in"),
    pooled_width=inputs_of("vector_in.in_layer"),
)
