"""OmniGen 2: refiners of the image and of references, then one stream of all."""

from ..plan import Along, Plan, Site, Tokens, Whole
from .network import Network, joint, layers

IMAGE, REFERENCES, JOINT = ("image",), ("references",), ("joint",)


def refiner(name: str, streams: tuple[str, ...]) -> Site:
    return Site(
        name,
        {"hidden_states": Tokens(streams), "image_rotary_emb": Along(streams)},
        attends=streams,
        whole=("temb",),
        gathers=True,
        aside=True,
    )


REFINERS = (refiner("noise_refiner", IMAGE), refiner("ref_image_refiner", REFERENCES))

PLAN = Plan(
    (
        *REFINERS,
        Site(
            "layers", {"hidden_states": Tokens(JOINT), "image_rotary_emb": Along(JOINT)}, attends=JOINT, whole=("temb",)
        ),
        Site("norm_out", {"x": Whole(JOINT)}),
    ),
    main="joint",
)

NETWORK = Network(
    name="OmniGen 2",
    kinds=("comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel",),
    plan=PLAN,
    heads=lambda net: net.layers[0].attn.heads,
    layers=layers("noise_refiner", "layers"),
    tokens=joint(2),
)
