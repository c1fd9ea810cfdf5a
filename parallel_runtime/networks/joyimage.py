"""JoyImage. The parent slices references off right after the blocks, so they end whole."""

from ..plan import Along, Plan, Site, Tokens
from .network import Network, image, layers

IMAGE, TEXT = ("image",), ("text",)

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
    heads=lambda net: net.double_blocks[0].attn.num_attention_heads,
    width=lambda net: net.img_in.out_channels,
    layers=layers("double_blocks"),
    tokens=image(2),
)
