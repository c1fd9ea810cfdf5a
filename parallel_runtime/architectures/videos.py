"""Networks of videos; HunyuanVideo stands with FLUX, whose blocks it has."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .split_plan import (
    AUDIO,
    JOINT,
    TEXT,
    VIDEO,
    Architecture,
    Count,
    Cross,
    Frames,
    Gather,
    HeadProducer,
    ModulePlan,
    Slices,
    Split,
    SplitLike,
    SplitPlan,
    inputs_of,
)

# CogVideoX.
COGVIDEOX_BLOCKS = ModulePlan(
    "blocks",
    {"hidden_states": Split(VIDEO), "encoder_hidden_states": Split(TEXT), "image_rotary_emb": SplitLike(VIDEO, -2)},
    attends=TEXT + VIDEO,
    unsplit_args=("temb",),
)
COGVIDEOX = Architecture(
    name="CogVideoX",
    kinds=("comfy.ldm.cogvideo.model:CogVideoXTransformer3DModel",),
    plan=SplitPlan((COGVIDEOX_BLOCKS, ModulePlan("proj_out", {0: Gather(VIDEO, after=True)}))),
)

# Cosmos 1, whose tokens come as [frames, rows, columns, B, C], with positions added to them in full between blocks.
# Cosmos Predict2, and Anima, which puts a text adapter before it, have them as [B, frames, rows, columns, C].
COSMOS_V1_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(VIDEO, dim=0, flat=3), "rope_emb_L_1_1_D": SplitLike(VIDEO, 0)},
    attends=VIDEO,
    submodule_attends={"blocks.1": "local"},
    unsplit_args=("emb_B_D", "crossattn_emb", "crossattn_mask", "adaln_lora_B_3D"),
    gathers="each",
)
COSMOS_V1 = Architecture(
    name="Cosmos 1", kinds=("comfy.ldm.cosmos.model:GeneralDIT",), plan=SplitPlan((COSMOS_V1_BLOCKS,)), patch=(1, 2, 2)
)

COSMOS_PREDICT2_BLOCKS = ModulePlan(
    "blocks",
    {
        "x_B_T_H_W_D": Split(VIDEO, flat=3),
        "emb_B_T_D": SplitLike(VIDEO, per=True),
        "adaln_lora_B_T_3D": SplitLike(VIDEO, per=True),
        "rope_emb_L_1_1_D": SplitLike(VIDEO),
    },
    attends=VIDEO,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("crossattn_emb",),
)
COSMOS_PREDICT2_LAST = ModulePlan(
    "final_layer",
    {
        "x_B_T_H_W_D": Gather(VIDEO, after=True),
        "emb_B_T_D": SplitLike(VIDEO, per=True),
        "adaln_lora_B_T_3D": SplitLike(VIDEO, per=True),
    },
)
COSMOS_PREDICT2 = Architecture(
    name="Cosmos Predict2",
    kinds=("comfy.ldm.cosmos.predict2:MiniTrainDIT", "comfy.ldm.anima.model:Anima"),
    plan=SplitPlan((COSMOS_PREDICT2_BLOCKS, COSMOS_PREDICT2_LAST)),
    patch=(1, 2, 2),
)

# Kandinsky 5 (image and video). The text has blocks of its own, full on every rank.
KANDINSKY5_BLOCKS = ModulePlan(
    "visual_transformer_blocks",
    {"visual_embed": Split(VIDEO), "freqs": SplitLike(VIDEO)},
    attends=VIDEO,
    submodule_attends={"cross_attention": "local"},
    unsplit_args=("text_embed", "time_embed"),
    gathers=True,
)
KANDINSKY5 = Architecture(
    name="Kandinsky 5", kinds=("comfy.ldm.kandinsky5.model:Kandinsky5",), plan=SplitPlan((KANDINSKY5_BLOCKS,))
)

# LTX-Video, and LTX-2 with its audio. Texts are read as keys only: full on every rank.
LTXV_MASKS = ("attention_mask", "self_attention_mask")
LTXV_BLOCKS = ModulePlan(
    "transformer_blocks",
    {"x": Split(VIDEO), "pe": (SplitLike(VIDEO), None), "timestep": SplitLike(VIDEO)},
    attends=VIDEO,
    submodule_attends={"attn2": "local"},
    unsplit_args=(*LTXV_MASKS, "context", "prompt_timestep"),
)
LTXV = Architecture(
    name="LTX-Video",
    kinds=("comfy.ldm.lightricks.model:LTXVModel",),
    plan=SplitPlan((LTXV_BLOCKS, ModulePlan("norm_out", {0: Gather(VIDEO)}))),
    patch=(1, 1, 1),
)


def _split_timestep(timestep: Any, split: Callable[[Any, Any], Any]) -> Any:
    """Expands one timestep a frame to one a token, and splits it: a rank's tokens may begin inside a frame."""
    full = timestep.expand() if hasattr(timestep, "expand_for_computation") else timestep
    if full.shape[1] == 1:
        return timestep
    return type(timestep)(split(full, SplitLike(VIDEO)), None)


LTXAV_BLOCKS = ModulePlan(
    "transformer_blocks",
    {
        "x": (Split(VIDEO), Split(AUDIO)),
        **dict.fromkeys(("v_timestep", "v_cross_scale_shift_timestep", "v_cross_gate_timestep"), _split_timestep),
        **dict.fromkeys(("a_timestep", "a_cross_scale_shift_timestep", "a_cross_gate_timestep"), SplitLike(AUDIO)),
        **dict.fromkeys(("v_pe", "v_cross_pe"), (SplitLike(VIDEO), None)),
        **dict.fromkeys(("a_pe", "a_cross_pe"), (SplitLike(AUDIO), None)),
    },
    attends=VIDEO,
    submodule_attends={
        "attn2": "local",
        "audio_attn2": "local",
        "audio_attn1": AUDIO,
        "audio_to_video_attn": Cross(queries=VIDEO, keys=AUDIO),
        "video_to_audio_attn": Cross(queries=AUDIO, keys=VIDEO),
    },
    unsplit_args=("v_context", "a_context", *LTXV_MASKS, "v_prompt_timestep", "a_prompt_timestep"),
    gathers=True,
)
LTXAV = replace(
    LTXV, name="LTX-2", kinds=("comfy.ldm.lightricks.av_model:LTXAVModel",), plan=SplitPlan((LTXAV_BLOCKS,))
)

# MiniMax H3: text, conditions, audio and video in one stream of tokens without a batch.
MINIMAX_H3_HEADS = HeadProducer(
    module="attn", qkv="qkv_proj", out="out_proj", gate="to_gate_compress", full="rope_freqs"
)
MINIMAX_H3_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(JOINT, dim=0), "mod_segments": Slices(JOINT), "rope_freqs": SplitLike(JOINT)},
    attends=JOINT,
    head_producers={"attention": MINIMAX_H3_HEADS},
    unsplit_args=("t_emb",),
)
RANGES = ("video_seg", "audio_seg")
MINIMAX_H3_LAST = ModulePlan(
    "final_layer",
    {
        "x": Gather(JOINT, dim=0, after=True, ranges=RANGES),
        **dict.fromkeys(RANGES, lambda value, split: split([value], Slices(JOINT))[0]),
    },
    unsplit_args=("t_emb",),
)
MINIMAX_H3 = Architecture(
    name="MiniMax H3",
    kinds=("comfy.ldm.minimax.model:MiniMaxH3Model",),
    plan=SplitPlan((MINIMAX_H3_BLOCKS, MINIMAX_H3_LAST)),
    width=lambda net: net.blocks[0].attn.heads * net.blocks[0].attn.head_dim,
)

# Mochi. Of the text, which is full on every rank, only the first tokens are attended to: the prompt's.
PROMPT = ("prompt",)
MOCHI_BLOCKS = ModulePlan(
    "blocks",
    {
        "x": Split(VIDEO),
        "y": Split(TEXT),
        "rope_cos": SplitLike(VIDEO, 0),
        "rope_sin": SplitLike(VIDEO, 0),
        "crop_y": Count(PROMPT),
    },
    attends=VIDEO + PROMPT,
    unsplit_args=("c",),
)
MOCHI_LAST = ModulePlan("final_layer", {"x": Gather(VIDEO, after=True)}, unsplit_args=("c",))
MOCHI = Architecture(
    name="Mochi",
    kinds=("comfy.ldm.genmo.joint_model.asymm_models_joint:AsymmDiTJoint",),
    plan=SplitPlan((MOCHI_BLOCKS, MOCHI_LAST), replicated=frozenset(TEXT + PROMPT)),
    width=lambda net: net.hidden_size_x,
)

# Wan 2.1 and 2.2: text and image to video, first and last frame, 5B, Fun control, camera, SCAIL, causal
# (all frames at once), VACE. The text is read as keys only, and is full on every rank.
#
# Those that follow a face, a voice or music (Animate, S2V, HuMo, Dancer) have tokens attend to conditions of their
# frame.
WAN_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(VIDEO), "e": SplitLike(VIDEO, per=True, ndim=4), "freqs": SplitLike(VIDEO)},
    attends=VIDEO,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("context", "context_img_len"),
)
WAN_HEAD = ModulePlan("head", {"x": Gather(VIDEO, after=True), "e": SplitLike(VIDEO, per=True, ndim=3)})

WAN = Architecture(
    name="Wan",
    kinds=(
        "comfy.ldm.wan.model:WanModel",
        "comfy.ldm.wan.model:CameraWanModel",
        "comfy.ldm.wan.model:SCAILWanModel",
        "comfy.ldm.wan.model:SCAIL2WanModel",
        "comfy.ldm.wan.ar_model:CausalWanModel",  # not frame by frame, with the keys that its sampler keeps
    ),
    plan=SplitPlan((WAN_BLOCKS, WAN_HEAD)),
    text_width=inputs_of("text_embedding.0"),
)

VACE_BLOCKS = replace(
    WAN_BLOCKS,
    name="vace_blocks",
    args={"c": Split(VIDEO), **WAN_BLOCKS.args},
    never_skipped=True,
    updates=("c", "c"),
    runs_with=lambda net: list(net.vace_layers_mapping),
)
WAN_VACE = replace(
    WAN,
    name="Wan VACE",
    kinds=("comfy.ldm.wan.model:VaceWanModel",),
    plan=SplitPlan((WAN_BLOCKS, VACE_BLOCKS, WAN_HEAD)),
)


def wan_driven(name: str, kind: str, *module_plans: ModulePlan, blocks: ModulePlan = WAN_BLOCKS) -> Architecture:
    return replace(WAN, name=name, kinds=(f"comfy.ldm.wan.{kind}",), plan=SplitPlan((blocks, *module_plans, WAN_HEAD)))


def wan_injector(name: str) -> ModulePlan:
    frames = Frames(stream="video", tokens="x", conditions=("audio_emb", "audio_emb_global"), until="seq_len")
    return ModulePlan(name, frames=frames, unsplit_args=("block_id", "scale"))


WAN_ANIMATE = wan_driven(
    "Wan Animate",
    "model_animate:AnimateWanModel",
    ModulePlan("face_adapter.fuser_blocks", frames=Frames(stream="video", tokens="x", conditions=("motion_vec",))),
)
WAN_S2V = wan_driven("Wan S2V", "model:WanModel_S2V", wan_injector("audio_injector"))
HUMO = wan_driven(
    "HuMo",
    "model:HumoWanModel",
    ModulePlan(
        "blocks.*.audio_cross_attn_wrapper", frames=Frames(stream="video", tokens="x", conditions=("audio",), each=16)
    ),
    blocks=replace(
        WAN_BLOCKS,
        submodule_attends={"cross_attn": "local", "audio_cross_attn_wrapper": "local"},
        unsplit_args=(*WAN_BLOCKS.unsplit_args, "audio"),
    ),
)
DANCER = wan_driven(
    "WanDancer", "model_wandancer:WanDancerModel", wan_injector("music_injector"), replace(WAN_HEAD, name="head_global")
)
