"""JoyImage. The parent slices references off right after the blocks, so they end whole."""

from ..plan import IMAGE, TEXT, Along, Plan, Site, Tokens
from .network import Network

NETWORK = Network(
    name="JoyImage",
    kinds=("comfy.ldm.joyimage.model:JoyImageTransformer3DModel",),
    plan=Plan(
        (
            Site(
                "double_blocks",
                {
                    "hidden_states": Tokens(IMAGE),
                    "encoder_hidden_states": Tokens(TEXT),
                    "image_rotary_emb": Along(IMAGE),
                },
                attends=IMAGE + TEXT,
                whole=("temb",),
                gathers=True,
            ),
        )
    ),
    width=lambda net: net.img_in.out_channels,
)
