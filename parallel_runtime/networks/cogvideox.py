"""CogVideoX."""

from ..plan import TEXT, VIDEO, Along, Plan, Site, Tokens, Whole
from .network import Network

NETWORK = Network(
    name="CogVideoX",
    kinds=("comfy.ldm.cogvideo.model:CogVideoXTransformer3DModel",),
    plan=Plan(
        (
            Site(
                "blocks",
                {
                    "hidden_states": Tokens(VIDEO),
                    "encoder_hidden_states": Tokens(TEXT),
                    "image_rotary_emb": Along(VIDEO, -2),
                },
                attends=TEXT + VIDEO,
                whole=("temb",),
            ),
            Site("norm_final", {0: Whole(VIDEO)}),
        ),
    ),
)
