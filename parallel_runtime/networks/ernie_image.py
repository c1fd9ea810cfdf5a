"""ERNIE-Image: image and text in one stream. Its attention is called without transformer_options."""

from ..plan import JOINT, Along, Plan, Site, Tokens, Whole
from .network import Network

NETWORK = Network(
    name="ERNIE-Image",
    kinds=("comfy.ldm.ernie.model:ErnieImageModel",),
    plan=Plan(
        (
            Site("layers", {"x": Tokens(JOINT), "rotary_pos_emb": Along(JOINT)}, attends=JOINT, whole=("temb",)),
            Site("final_norm", {"x": Whole(JOINT)}),
        ),
        no_options=("comfy.ldm.ernie.model",),
    ),
)
