"""Plans of ours for transformers for which diffusers has none, or a wrong one: class name -> Plan."""

from __future__ import annotations

from ...old_plan import Cross, Gather, Plan, Split

# The three kinds of text and the padding between them are put into one row before the blocks: one stream from there.
HUNYUAN_VIDEO_15 = Plan(
    inputs={
        "transformer_blocks.0": {
            "hidden_states": Split(dim=1, stream="image"),
            "encoder_hidden_states": Split(dim=1, stream="text"),
        },
        "transformer_blocks.*": {"attention_mask": Split(dim=1, stream="text")},
    },
    outputs_split={"rope": {0: Split(dim=0, stream="image"), 1: Split(dim=0, stream="image")}},
    outputs={"proj_out": Gather(dim=1, stream="image")},
    joint=("image", "text"),
    attention={"context_embedder.token_refiner.refiner_blocks.*.attn": "local"},
)

_BLOCK = "transformer_blocks.*"


def _positions(stream: str) -> dict[int, Split]:
    """Cosines and sines, [B, tokens, dim] interleaved or [B, heads, tokens, dim] split."""
    return {0: Split(dim=-2, stream=stream), 1: Split(dim=-2, stream=stream)}


# diffusers' plan knows no audio, no split rope and no mask. Texts are read as keys only: whole on every rank.
LTX2 = Plan(
    inputs={
        "": {
            "hidden_states": Split(dim=1, stream="video"),
            "audio_hidden_states": Split(dim=1, stream="audio"),
            "timestep": Split(dim=1, stream="video", ndim=2),
            "audio_timestep": Split(dim=1, stream="audio", ndim=2),
            "video_keyframes_mask": Split(dim=1, stream="video"),
        }
    },
    outputs_split={
        "rope": _positions("video"),
        "cross_attn_rope": _positions("video"),
        "audio_rope": _positions("audio"),
        "cross_attn_audio_rope": _positions("audio"),
    },
    outputs={"proj_out": Gather(dim=1, stream="video"), "audio_proj_out": Gather(dim=1, stream="audio")},
    joint=("video",),
    attention={
        f"{_BLOCK}.audio_attn1": ("audio",),
        f"{_BLOCK}.audio_to_video_attn": Cross(queries=("video",), keys=("audio",)),
        f"{_BLOCK}.video_to_audio_attn": Cross(queries=("audio",), keys=("video",)),
        f"{_BLOCK}.attn2": "local",
        f"{_BLOCK}.audio_attn2": "local",
    },
)

PLANS = {"HunyuanVideo15Transformer3DModel": HUNYUAN_VIDEO_15, "LTX2VideoTransformer3DModel": LTX2}
