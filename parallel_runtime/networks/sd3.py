"""SD3 and SD3.5. Blocks of the medium model attend a second time, to the image alone."""

from ..plan import IMAGE, TEXT, Plan, Site, Tokens, Whole
from .network import Network, inputs_of

PLAN = Plan(
    (
        Site(
            "joint_blocks",
            {0: Tokens(TEXT), 1: Tokens(IMAGE)},
            attends=[TEXT + IMAGE, IMAGE],
            whole=("c", "use_checkpoint"),
        ),
        Site("final_layer", {"x": Whole(IMAGE)}),
    )
)

NETWORK = Network(
    name="Stable Diffusion 3",
    kinds=("comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",),
    plan=PLAN,
    text_width=inputs_of("context_embedder"),
    pooled_width=inputs_of("y_embedder.mlp.0"),
)
