"""Mochi. Of the text, which is whole on every rank, only so many first tokens are attended to: the prompt's."""

from ..plan import TEXT, VIDEO, Along, Count, Plan, Site, Tokens, Whole
from .network import Network

PROMPT = ("prompt",)

NETWORK = Network(
    name="Mochi",
    kinds=("comfy.ldm.genmo.joint_model.asymm_models_joint:AsymmDiTJoint",),
    plan=Plan(
        (
            Site(
                "blocks",
                {
                    "x": Tokens(VIDEO),
                    "y": Tokens(TEXT),
                    "rope_cos": Along(VIDEO, 0),
                    "rope_sin": Along(VIDEO, 0),
                    "crop_y": Count(PROMPT),
                },
                attends=VIDEO + PROMPT,
                whole=("c",),
            ),
            Site("final_layer", {"x": Whole(VIDEO)}),
        ),
        replicated=frozenset(TEXT + PROMPT),
    ),
    width=lambda net: net.hidden_size_x,
)
