"""Wan 2.1 and 2.2: text and image to video, first and last frame, 5B, Fun control, camera, SCAIL, causal
(all frames at once), VACE. The text is read as keys only, and is whole on every rank.

Those that follow a face, a voice or music (Animate, S2V, HuMo, Dancer) have tokens attend to conditions of their frame.
"""

from dataclasses import replace

from ..plan import VIDEO, Along, Frames, Plan, Site, Tokens, Whole
from .network import Network, inputs_of

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
    plan=Plan((BLOCKS, HEAD)),
    text_width=inputs_of("text_embedding.0"),
)

VACE_BLOCKS = replace(
    BLOCKS,
    name="vace_blocks",
    args={"c": Tokens(VIDEO), **BLOCKS.args},
    aside=True,
    gives=("c", "c"),
    beside=lambda net: list(net.vace_layers_mapping),
)
VACE = replace(
    NETWORK,
    name="Wan VACE",
    kinds=("comfy.ldm.wan.model:VaceWanModel",),
    plan=Plan((BLOCKS, VACE_BLOCKS, HEAD)),
)


def driven(name: str, kind: str, *sites: Site, blocks: Site = BLOCKS) -> Network:
    return replace(NETWORK, name=name, kinds=(f"comfy.ldm.wan.{kind}",), plan=Plan((blocks, *sites, HEAD)))


def injector(name: str) -> Site:
    frames = Frames(stream="video", tokens="x", conditions=("audio_emb", "audio_emb_global"), until="seq_len")
    return Site(name, frames=frames, whole=("block_id", "scale"))


ANIMATE = driven(
    "Wan Animate",
    "model_animate:AnimateWanModel",
    Site("face_adapter.fuser_blocks", frames=Frames(stream="video", tokens="x", conditions=("motion_vec",))),
)
S2V = driven("Wan S2V", "model:WanModel_S2V", injector("audio_injector"))
HUMO = driven(
    "HuMo",
    "model:HumoWanModel",
    Site(
        "blocks.*.audio_cross_attn_wrapper",
        frames=Frames(stream="video", tokens="x", conditions=("audio",), each=16),
    ),
    blocks=replace(
        BLOCKS,
        within={"cross_attn": "local", "audio_cross_attn_wrapper": "local"},
        whole=(*BLOCKS.whole, "audio"),
    ),
)
DANCER = driven(
    "WanDancer",
    "model_wandancer:WanDancerModel",
    injector("music_injector"),
    Site("head_global", {"x": Whole(VIDEO)}),
)
