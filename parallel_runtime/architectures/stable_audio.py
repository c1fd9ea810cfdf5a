"""Stable Audio: one stream, with what stands for the whole of it in front."""

from .architecture import Architecture
from .split_plan import AUDIO, ModulePlan, Split, SplitLike, SplitPlan

LAYERS = ModulePlan(
    "transformer.layers",
    {
        "x": Split(AUDIO),
        "rotary_pos_emb": (SplitLike(AUDIO, 0), None),
        "local_add_cond": SplitLike(AUDIO, at_end=True),
    },
    attends=AUDIO,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("context", "global_cond"),
    gathers=True,
)
NETWORK = Architecture(
    name="Stable Audio",
    kinds=("comfy.ldm.audio.dit:AudioDiffusionTransformer",),
    plan=SplitPlan((LAYERS,)),
    width=lambda net: net.transformer.dim,
    fits=lambda net: (
        not any(getattr(part, "feat_scale", False) or hasattr(part, "depthwise_conv") for part in net.modules())
    ),
)
