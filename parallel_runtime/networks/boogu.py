"""Boogu: OmniGen 2's refiners, blocks of two streams that attend twice, then blocks of one stream."""

from ..plan import JOINT, TEXT, Along, Plan, Site, Tokens, Whole
from .network import Network
from .omnigen2 import REFINERS

IMAGES = ("images",)  # of references and the one that is made

PLAN = Plan(
    (
        *REFINERS,
        Site(
            "double_stream_layers",
            {
                "img_hidden_states": Tokens(IMAGES),
                "instruct_hidden_states": Tokens(TEXT),
                "joint_rotary_emb": Along(TEXT + IMAGES),
                "img_rotary_emb": Along(IMAGES),
            },
            attends=[TEXT + IMAGES, IMAGES],
            whole=("temb",),
            gathers=True,
        ),
        Site(
            "single_stream_layers",
            {"hidden_states": Tokens(JOINT), "image_rotary_emb": Along(JOINT)},
            attends=JOINT,
            whole=("temb",),
        ),
        Site("norm_out", {"x": Whole(JOINT)}),
    ),
)

NETWORK = Network(
    name="Boogu",
    kinds=("comfy.ldm.boogu.model:BooguTransformer2DModel",),
    plan=PLAN,
)
