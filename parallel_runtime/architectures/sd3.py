"""SD3 and SD3.5. Blocks of the medium model attend a second time, to the image alone."""

from .architecture import Architecture, inputs_of
from .split_plan import IMAGE, TEXT, Gather, ModulePlan, Split, SplitPlan

BLOCKS = ModulePlan(
    "joint_blocks",
    {0: Split(TEXT), 1: Split(IMAGE)},
    attends=[TEXT + IMAGE, IMAGE],
    unsplit_args=("c", "use_checkpoint"),
)
PLAN = SplitPlan((BLOCKS, ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("c",))))

NETWORK = Architecture(
    name="Stable Diffusion 3",
    kinds=("comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",),
    plan=PLAN,
    text_width=inputs_of("context_embedder"),
    pooled_width=inputs_of("y_embedder.mlp.0"),
)
