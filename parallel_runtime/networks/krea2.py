"""Krea 2: text and image in one stream."""

from ..plan import JOINT, Along, Index, Plan, Site, Tokens, Whole
from .network import Network

NETWORK = Network(
    name="Krea 2",
    kinds=("comfy.ldm.krea2.model:SingleStreamDiT",),
    plan=Plan(
        (
            Site(
                "blocks",
                {"x": Tokens(JOINT), "freqs": Along(JOINT, 2), "timestep_zero_index": Index("joint")},
                attends=JOINT,
                whole=("vec",),
            ),
            Site("last", {"x": Whole(JOINT)}),
        ),
    ),
    width=lambda net: net.first.out_features,
    patch=(1, 2, 2),
)
