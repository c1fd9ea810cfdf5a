"""FLUX.1 (dev, schnell, Fill, depth, canny, Kontext, USO) and FLUX.2 (dev, klein): one class, one plan."""

from .architecture import Architecture, inputs_of
from .split_plan import IMAGE, TEXT, Gather, ModulePlan, Slices, Split, SplitLike, SplitPlan

BOTH = TEXT + IMAGE

# It stays cut between the two stacks, so that residuals, which are added between blocks, fit.
PLAN = SplitPlan(
    (
        ModulePlan(
            "double_blocks",
            {"img": Split(IMAGE), "txt": Split(TEXT), "pe": SplitLike(BOTH, 2), "modulation_dims_img": Slices(IMAGE)},
            attends=BOTH,
            unsplit_args=("vec", "attn_mask"),
        ),
        ModulePlan(
            "single_blocks",
            {"x": Split(BOTH), "pe": SplitLike(BOTH, 2), "modulation_dims": Slices(IMAGE, after=TEXT)},
            attends=BOTH,
            unsplit_args=("vec", "attn_mask"),
        ),
        ModulePlan("final_layer", {"x": Gather(IMAGE)}),
    )
)

NETWORK = Architecture(
    name="FLUX",
    kinds=("comfy.ldm.flux.model:Flux",),
    plan=PLAN,
    text_width=inputs_of("txt_in"),
    pooled_width=inputs_of("vector_in.in_layer"),
)
