"""Lens."""

from ..plan import IMAGE, TEXT, Along, Plan, Site, Tokens, Whole
from .network import Network

BOTH = IMAGE + TEXT

NETWORK = Network(
    name="Lens",
    kinds=("comfy.ldm.lens.model:LensTransformer2DModel",),
    plan=Plan(
        (
            Site(
                "transformer_blocks",
                {
                    "encoder_hidden_states": Tokens(TEXT),
                    "hidden_states": Tokens(IMAGE),
                    "freqs_cis": Along(BOTH, 2),
                    "attention_mask": Along(BOTH, -1),
                },
                attends=BOTH,
                whole=("temb",),
            ),
            Site("norm_out", {"x": Whole(IMAGE)}),
        )
    ),
    patch=(1, 1, 1),
)
