"""Wan 2.1 and 2.2: text and image to video, first and last frame, 5B, Fun control, camera, SCAIL, causal
(all frames at once), VACE. The text is read as keys only, and is full on every rank.

Those that follow a face, a voice or music (Animate, S2V, HuMo, Dancer) have tokens attend to conditions of their frame.
"""

from dataclasses import replace

from .architecture import Architecture, inputs_of
from .split_plan import VIDEO, Frames, Gather, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(VIDEO), "e": SplitLike(VIDEO, per=True, ndim=4), "freqs": SplitLike(VIDEO)},
    attends=VIDEO,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("context", "context_img_len"),
)
HEAD = ModulePlan("head", {"x": Gather(VIDEO, after=True), "e": SplitLike(VIDEO, per=True, ndim=3)})

NETWORK = Architecture(
    name="Wan",
    kinds=(
        "comfy.ldm.wan.model:WanModel",
        "comfy.ldm.wan.model:CameraWanModel",
        "comfy.ldm.wan.model:SCAILWanModel",
        "comfy.ldm.wan.model:SCAIL2WanModel",
        "comfy.ldm.wan.ar_model:CausalWanModel",  # not frame by frame, with the keys that its sampler keeps
    ),
    plan=SplitPlan((BLOCKS, HEAD)),
    text_width=inputs_of("text_embedding.0"),
)

VACE_BLOCKS = replace(
    BLOCKS,
    name="vace_blocks",
    args={"c": Split(VIDEO), **BLOCKS.args},
    never_skipped=True,
    updates=("c", "c"),
    runs_with=lambda net: list(net.vace_layers_mapping),
)
VACE = replace(
    NETWORK, name="Wan VACE", kinds=("comfy.ldm.wan.model:VaceWanModel",), plan=SplitPlan((BLOCKS, VACE_BLOCKS, HEAD))
)


def driven(name: str, kind: str, *module_plans: ModulePlan, blocks: ModulePlan = BLOCKS) -> Architecture:
    return replace(NETWORK, name=name, kinds=(f"comfy.ldm.wan.{kind}",), plan=SplitPlan((blocks, *module_plans, HEAD)))


def injector(name: str) -> ModulePlan:
    frames = Frames(stream="video", tokens="x", conditions=("audio_emb", "audio_emb_global"), until="seq_len")
    return ModulePlan(name, frames=frames, unsplit_args=("block_id", "scale"))


ANIMATE = driven(
    "Wan Animate",
    "model_animate:AnimateWanModel",
    ModulePlan("face_adapter.fuser_blocks", frames=Frames(stream="video", tokens="x", conditions=("motion_vec",))),
)
S2V = driven("Wan S2V", "model:WanModel_S2V", injector("audio_injector"))
HUMO = driven(
    "HuMo",
    "model:HumoWanModel",
    ModulePlan(
        "blocks.*.audio_cross_attn_wrapper", frames=Frames(stream="video", tokens="x", conditions=("audio",), each=16)
    ),
    blocks=replace(
        BLOCKS,
        submodule_attends={"cross_attn": "local", "audio_cross_attn_wrapper": "local"},
        unsplit_args=(*BLOCKS.unsplit_args, "audio"),
    ),
)
DANCER = driven(
    "WanDancer",
    "model_wandancer:WanDancerModel",
    injector("music_injector"),
    replace(HEAD, name="head_global"),
)
