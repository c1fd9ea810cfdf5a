"""The plans of diffusers' transformers that make videos, on diffusers' names. Imports no diffusers."""

from __future__ import annotations

from ..plan import Along, Cross, Index, Names, Plan, Site, Tokens, Whole, Word

IMAGE, TEXT, VIDEO, AUDIO, JOINT = ("image",), ("text",), ("video",), ("audio",), ("joint",)


def _rope(streams: Names, dim: int) -> tuple[Along, Along]:
    """Cosines and sines."""
    return Along(streams, dim), Along(streams, dim)


WAN = Plan(
    (
        Site(
            "blocks",
            {"hidden_states": Tokens(VIDEO), "temb": Along(VIDEO, ndim=4), "rotary_emb": _rope(VIDEO, 1)},
            VIDEO,
            {"attn2": "local"},
            whole=("encoder_hidden_states",),
        ),
        Site("norm_out", {0: Whole(VIDEO)}),
    ),
    main="video",
)

# Tokens of the past come first; how many those of today are is told to every block.
HELIOS = Plan(
    (
        Site(
            "blocks",
            {
                "hidden_states": Tokens(VIDEO),
                "temb": Along(VIDEO, ndim=4),
                "rotary_emb": Along(VIDEO),
                "original_context_length": Index("video", to_end=True),
            },
            VIDEO,
            {"attn2": "local"},
            whole=("encoder_hidden_states",),
        ),
        Site("norm_out", {"hidden_states": Whole(VIDEO)}),
    ),
    main="video",
)

LTX_VIDEO = Plan(
    (
        Site(
            "transformer_blocks",
            {"hidden_states": Tokens(VIDEO), "temb": Along(VIDEO), "image_rotary_emb": _rope(VIDEO, -2)},
            VIDEO,
            {"attn2": "local"},
            whole=("encoder_hidden_states", "encoder_attention_mask"),
        ),
        Site("norm_out", {0: Whole(VIDEO)}),
    ),
    main="video",
)

LTX2 = Plan(
    (
        Site(
            "transformer_blocks",
            {
                "hidden_states": Tokens(VIDEO),
                "audio_hidden_states": Tokens(AUDIO),
                "temb": Along(VIDEO),
                "temb_audio": Along(AUDIO),
                "temb_ca_scale_shift": Along(VIDEO),
                "temb_ca_audio_scale_shift": Along(AUDIO),
                "temb_ca_gate": Along(VIDEO),
                "temb_ca_audio_gate": Along(AUDIO),
                "video_rotary_emb": _rope(VIDEO, -2),
                "audio_rotary_emb": _rope(AUDIO, -2),
                "ca_video_rotary_emb": _rope(VIDEO, -2),
                "ca_audio_rotary_emb": _rope(AUDIO, -2),
            },
            VIDEO,
            {
                "audio_attn1": AUDIO,
                "audio_to_video_attn": Cross(queries=VIDEO, keys=AUDIO),
                "video_to_audio_attn": Cross(queries=AUDIO, keys=VIDEO),
                "attn2": "local",
                "audio_attn2": "local",
            },
            whole=(
                "encoder_hidden_states", "audio_encoder_hidden_states", "temb_prompt", "temb_prompt_audio",
                "encoder_attention_mask", "audio_encoder_attention_mask", 
                "use_a2v_cross_attention", "use_v2a_cross_attention", "perturbation_mask", "all_perturbed",
            ),
        ),
        Site("norm_out", {0: Whole(VIDEO)}),
        Site("audio_norm_out", {0: Whole(AUDIO)}),
    ),
    main="video",
)  # fmt: skip

HUNYUAN_TOKENS: dict[str | int, Word] = {
    "hidden_states": Tokens(IMAGE),
    "encoder_hidden_states": Tokens(TEXT),
    4: _rope(IMAGE, 0),
}
# The last two are for a first frame that is given.
HUNYUAN_VIDEO = Plan(
    (
        *(
            Site(
                stack,
                HUNYUAN_TOKENS | {6: Index("image")},
                IMAGE + TEXT,
                whole=("temb", "attention_mask", "token_replace_emb"),
            )
            for stack in ("transformer_blocks", "single_transformer_blocks")
        ),
        Site("norm_out", {0: Whole(IMAGE)}),
    )
)
# The three kinds of text and the padding between them are put into one row before the blocks: one stream from there.
HUNYUAN_VIDEO_15 = Plan(
    (
        Site("transformer_blocks", HUNYUAN_TOKENS | {"attention_mask": Along(TEXT)}, IMAGE + TEXT, whole=("temb",)),
        Site("norm_out", {0: Whole(IMAGE)}),
    )
)

# Text, pictures, audio and video are one row of tokens.
MINIMAX_H3 = Plan(
    (
        Site(
            "transformer_blocks",
            {"hidden_states": Tokens(JOINT), "adaln_indices": Along(JOINT, 0), "rotary_emb": _rope(JOINT, 0)},
            JOINT,
            whole=("temb",),
        ),
        Site("norm_out", {0: Whole(JOINT)}),
    ),
    main="joint",
)
