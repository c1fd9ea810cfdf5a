"""Stable Audio: one stream, with what stands for the whole of it in front."""

from ..plan import AUDIO, Along, Plan, Site, Tokens
from .network import Network

NETWORK = Network(
    name="Stable Audio",
    kinds=("comfy.ldm.audio.dit:AudioDiffusionTransformer",),
    plan=Plan(
        (
            Site(
                "transformer.layers",
                {
                    "x": Tokens(AUDIO),
                    "rotary_pos_emb": (Along(AUDIO, 0), None),
                    "local_add_cond": Along(AUDIO, at_end=True),
                },
                attends=AUDIO,
                within={"cross_attn": "local"},
                whole=("context", "global_cond"),
                gathers=True,
            ),
        ),
    ),
    width=lambda net: net.transformer.dim,
    fits=lambda net: (
        not any(getattr(part, "feat_scale", False) or hasattr(part, "depthwise_conv") for part in net.modules())
    ),
)
