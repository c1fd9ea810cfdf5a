"""Boogu: OmniGen 2's refiners, blocks of two streams that attend twice, then blocks of one stream."""

from .architecture import Architecture
from .omnigen2 import REFINERS
from .split_plan import JOINT, TEXT, Gather, ModulePlan, Split, SplitLike, SplitPlan

IMAGES = ("images",)  # of references and the one that is made

PLAN = SplitPlan(
    (
        *REFINERS,
        ModulePlan(
            "double_stream_layers",
            {
                "img_hidden_states": Split(IMAGES),
                "instruct_hidden_states": Split(TEXT),
                "joint_rotary_emb": SplitLike(TEXT + IMAGES),
                "img_rotary_emb": SplitLike(IMAGES),
            },
            attends=[TEXT + IMAGES, IMAGES],
            unsplit_args=("temb",),
            gathers=True,
        ),
        ModulePlan(
            "single_stream_layers",
            {"hidden_states": Split(JOINT), "image_rotary_emb": SplitLike(JOINT)},
            attends=JOINT,
            unsplit_args=("temb",),
        ),
        ModulePlan("norm_out", {"x": Gather(JOINT)}),
    )
)

NETWORK = Architecture(name="Boogu", kinds=("comfy.ldm.boogu.model:BooguTransformer2DModel",), plan=PLAN)
