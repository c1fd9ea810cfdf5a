"""OmniGen 2: refiners of the image and of references, then one stream of all."""

from typing import Any

from ..plan import IMAGE, JOINT, Along, Plan, Site, Tokens, Whole
from .network import Network

REFERENCES = ("references",)


def refiner(name: str, streams: tuple[str, ...], **more: Any) -> Site:
    return Site(
        name,
        {"hidden_states": Tokens(streams), "image_rotary_emb": Along(streams)},
        attends=streams,
        whole=("temb",),
        gathers=True,
        aside=True,
        **more,
    )


def _with_the_last(net: Any) -> list[int]:
    """What both refine is joined next: one stage must have it all."""
    return [len(net.noise_refiner) - 1] * len(net.ref_image_refiner)


REFINERS = (refiner("noise_refiner", IMAGE), refiner("ref_image_refiner", REFERENCES, beside=_with_the_last))

PLAN = Plan(
    (
        *REFINERS,
        Site(
            "layers", {"hidden_states": Tokens(JOINT), "image_rotary_emb": Along(JOINT)}, attends=JOINT, whole=("temb",)
        ),
        Site("norm_out", {"x": Whole(JOINT)}),
    ),
)

NETWORK = Network(
    name="OmniGen 2",
    kinds=("comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel",),
    plan=PLAN,
)
