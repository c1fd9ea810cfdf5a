"""Wan that follows a face, a voice or music: Animate, S2V, HuMo, Dancer. Tokens attend to conditions of their frame."""

from dataclasses import replace

from ..plan import Frames, Plan, Site, Whole
from .network import Network, inputs_of, layers, video
from .wan import BLOCKS, HEAD, VIDEO


def driven(name: str, kind: str, *sites: Site, blocks: Site = BLOCKS) -> Network:
    return Network(
        name=name,
        kinds=(f"comfy.ldm.wan.{kind}",),
        plan=Plan((blocks, *sites, HEAD), main="video"),
        width=lambda net: net.dim,
        text_width=inputs_of("text_embedding.0"),
        layers=layers("blocks"),
        tokens=video(1, 2, 2),
    )


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
