"""LTX-Video, and LTX-2 with its audio. Texts are read as keys only: whole on every rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..plan import AUDIO, VIDEO, Along, Cross, Plan, Site, Tokens, Whole
from .network import Network

LTXV = Network(
    name="LTX-Video",
    kinds=("comfy.ldm.lightricks.model:LTXVModel",),
    plan=Plan(
        (
            Site(
                "transformer_blocks",
                {"x": Tokens(VIDEO), "pe": (Along(VIDEO), None), "timestep": Along(VIDEO)},
                attends=VIDEO,
                within={"attn2": "local"},
                whole=("attention_mask", "context", "prompt_timestep"),
            ),
            Site("norm_out", {0: Whole(VIDEO)}),
        ),
    ),
    patch=(1, 1, 1),
)


def _compressed(timestep: Any, cut: Callable[[Any, Any], Any]) -> Any:
    """One timestep a frame, as one a token: a chunk may begin inside a frame."""
    whole = timestep.expand() if hasattr(timestep, "expand_for_computation") else timestep
    if whole.shape[1] == 1:
        return timestep
    return type(timestep)(cut(whole, Along(VIDEO)), None)


LTXAV = replace(
    LTXV,
    name="LTX-2",
    kinds=("comfy.ldm.lightricks.av_model:LTXAVModel",),
    plan=Plan(
        (
            Site(
                "transformer_blocks",
                {
                    "x": (Tokens(VIDEO), Tokens(AUDIO)),
                    "v_timestep": _compressed,
                    "a_timestep": Along(AUDIO),
                    "v_pe": (Along(VIDEO), None),
                    "a_pe": (Along(AUDIO), None),
                    "v_cross_pe": (Along(VIDEO), None),
                    "a_cross_pe": (Along(AUDIO), None),
                    "v_cross_scale_shift_timestep": _compressed,
                    "a_cross_scale_shift_timestep": Along(AUDIO),
                    "v_cross_gate_timestep": _compressed,
                    "a_cross_gate_timestep": Along(AUDIO),
                },
                attends=VIDEO,
                within={
                    "attn2": "local",
                    "audio_attn2": "local",
                    "audio_attn1": AUDIO,
                    "audio_to_video_attn": Cross(queries=VIDEO, keys=AUDIO),
                    "video_to_audio_attn": Cross(queries=AUDIO, keys=VIDEO),
                },
                whole=("v_context", "a_context", "attention_mask", "v_prompt_timestep", "a_prompt_timestep"),
                gathers=True,
            ),
        ),
    ),
)
