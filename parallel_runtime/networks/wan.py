"""Wan 2.1 and 2.2: text and image to video, first and last frame, 5B, Fun control, camera, SCAIL, causal
(all frames at once), VACE.

The text is read as keys only, and is whole on every rank.
"""

from ..plan import Along, Plan, Site, Tokens, Whole
from .network import Network, inputs_of, layers, video

VIDEO = ("video",)
BLOCKS = Site(
    "blocks",
    {"x": Tokens(VIDEO), "e": Along(VIDEO, per=True, ndim=4), "freqs": Along(VIDEO)},
    attends=VIDEO,
    within={"cross_attn": "local"},
    whole=("context", "context_img_len"),
)
HEAD = Site("head", {"x": Whole(VIDEO)})

NETWORK = Network(
    name="Wan",
    kinds=(
        "comfy.ldm.wan.model:WanModel",
        "comfy.ldm.wan.model:CameraWanModel",
        "comfy.ldm.wan.model:SCAILWanModel",
        "comfy.ldm.wan.model:SCAIL2WanModel",
        "comfy.ldm.wan.ar_model:CausalWanModel",  # not frame by frame, with the keys that its sampler keeps
    ),
    plan=Plan((BLOCKS, HEAD), main="video"),
    width=lambda net: net.dim,
    text_width=inputs_of("text_embedding.0"),
    layers=layers("blocks"),
    tokens=video(1, 2, 2),
)

VACE_BLOCKS = Site(
    "vace_blocks",
    {"c": Tokens(VIDEO), "x": Tokens(VIDEO), "e": Along(VIDEO, per=True, ndim=4), "freqs": Along(VIDEO)},
    attends=VIDEO,
    within={"cross_attn": "local"},
    whole=("context", "context_img_len"),
    aside=True,
)

VACE = Network(
    name="Wan VACE",
    kinds=("comfy.ldm.wan.model:VaceWanModel",),
    plan=Plan((BLOCKS, VACE_BLOCKS, HEAD), main="video"),
    width=lambda net: net.dim,
    text_width=inputs_of("text_embedding.0"),
    layers=layers("blocks", "vace_blocks"),
    tokens=video(1, 2, 2),
)
