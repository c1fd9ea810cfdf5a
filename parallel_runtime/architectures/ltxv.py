"""LTX-Video, and LTX-2 with its audio. Texts are read as keys only: full on every rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .architecture import Architecture
from .split_plan import AUDIO, VIDEO, Cross, Gather, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "transformer_blocks",
    {"x": Split(VIDEO), "pe": (SplitLike(VIDEO), None), "timestep": SplitLike(VIDEO)},
    attends=VIDEO,
    submodule_attends={"attn2": "local"},
    unsplit_args=("attention_mask", "self_attention_mask", "context", "prompt_timestep"),
)
LTXV = Architecture(
    name="LTX-Video",
    kinds=("comfy.ldm.lightricks.model:LTXVModel",),
    plan=SplitPlan((BLOCKS, ModulePlan("norm_out", {0: Gather(VIDEO)}))),
    patch=(1, 1, 1),
)


def _split_timestep(timestep: Any, split: Callable[[Any, Any], Any]) -> Any:
    """Expands one timestep a frame to one a token, and splits it: a rank's tokens may begin inside a frame."""
    full = timestep.expand() if hasattr(timestep, "expand_for_computation") else timestep
    if full.shape[1] == 1:
        return timestep
    return type(timestep)(split(full, SplitLike(VIDEO)), None)


AUDIO_VIDEO_BLOCKS = ModulePlan(
    "transformer_blocks",
    {
        "x": (Split(VIDEO), Split(AUDIO)),
        "v_timestep": _split_timestep,
        "a_timestep": SplitLike(AUDIO),
        "v_pe": (SplitLike(VIDEO), None),
        "a_pe": (SplitLike(AUDIO), None),
        "v_cross_pe": (SplitLike(VIDEO), None),
        "a_cross_pe": (SplitLike(AUDIO), None),
        "v_cross_scale_shift_timestep": _split_timestep,
        "a_cross_scale_shift_timestep": SplitLike(AUDIO),
        "v_cross_gate_timestep": _split_timestep,
        "a_cross_gate_timestep": SplitLike(AUDIO),
    },
    attends=VIDEO,
    submodule_attends={
        "attn2": "local",
        "audio_attn2": "local",
        "audio_attn1": AUDIO,
        "audio_to_video_attn": Cross(queries=VIDEO, keys=AUDIO),
        "video_to_audio_attn": Cross(queries=AUDIO, keys=VIDEO),
    },
    unsplit_args=(
        "v_context",
        "a_context",
        "attention_mask",
        "self_attention_mask",
        "v_prompt_timestep",
        "a_prompt_timestep",
    ),
    gathers=True,
)
LTXAV = replace(
    LTXV,
    name="LTX-2",
    kinds=("comfy.ldm.lightricks.av_model:LTXAVModel",),
    plan=SplitPlan((AUDIO_VIDEO_BLOCKS,)),
)
