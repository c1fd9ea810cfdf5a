"""The plans of diffusers' transformers: class name to Plan, on diffusers' names. Imports no diffusers.

Its own `_cp_plan`s say which tensors are cut, not over which cut streams an attention runs; and some cut what must stay
whole, or leave out what must be cut. A class that is not here is refused: guessing would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..plan import AUDIO, IMAGE, JOINT, TEXT, VIDEO, Along, Cross, Index, Names, Plan, Site, Tokens, Whole, Word


def plan_of(transformer: nn.Module) -> Plan:
    """The Plan of a transformer's class; ValueError if we do not know it."""
    for kind in type(transformer).__mro__:  # FSDP makes a subclass of each module's class
        if kind.__name__ in PLANS:
            return PLANS[kind.__name__]
    raise ValueError(
        f"no context-parallel plan is known for {type(transformer).__name__} (known: {', '.join(PLANS)}); pass "
        "plan=Plan(...)"
    )


def _blocks(
    stack: str,
    args: Mapping[str | int, Word],
    attends: Names,
    whole: Names,
    before: tuple[Site, ...] = (),
    last: str = "norm_out",
    **more: Any,
) -> Plan:
    """A stack, after what comes `before`, and the `last` layer, which is given all of the latent's stream."""
    sites = (*before, Site(stack, args, attends, whole=whole, **more))
    return Plan((*sites, Site(last, {0: Whole((Plan(sites).main,))})))


def _refiner(argument: str, positions: str, whole: Names) -> tuple[Site, ...]:
    """Of the image, before text and image are one stream."""
    args: Mapping[str | int, Word] = {argument: Tokens(IMAGE), positions: Along(IMAGE)}
    return (Site("noise_refiner", args, IMAGE, whole=whole, gathers=True, aside=True),)


_IDS: Mapping[str | int, Word] = {
    "hidden_states": Tokens(IMAGE),
    "encoder_hidden_states": Tokens(TEXT),
    "img_ids": Along(IMAGE, -2),
    "txt_ids": Along(TEXT, -2),
}
_RESIDUALS: Mapping[str | int, Word] = {
    "controlnet_block_samples": Along(IMAGE),
    "controlnet_single_block_samples": Along(IMAGE),
}
_APART: Mapping[str | int, Word] = {"encoder_hidden_states": Tokens(TEXT), "hidden_states": Tokens(IMAGE)}
_TOGETHER: Mapping[str | int, Word] = {"hidden_states": Tokens(TEXT + IMAGE)}


def _flux(single: Mapping[str | int, Word], inputs: Mapping[str | int, Word]) -> Plan:
    """All is cut where the transformer gets it; positions are computed from ids, which are cut then."""
    whole = ("timestep", "pooled_projections", "guidance", "joint_attention_kwargs", "attention_mask", "return_dict",
             "controlnet_blocks_repeat", "num_ref_tokens", "ref_fixed_timestep")  # fmt: skip
    of_blocks = ("temb", "temb_mod", "temb_mod_img", "temb_mod_txt", "image_rotary_emb", "joint_attention_kwargs",
                 "attention_mask")  # fmt: skip
    return Plan(
        (
            Site("", {**_IDS, **inputs}, TEXT + IMAGE, whole=whole, aside=True),
            Site("transformer_blocks", _APART, whole=of_blocks),
            Site("single_transformer_blocks", single, whole=of_blocks),
            Site("proj_out", gathers=True, returns=(IMAGE,)),
        )
    )


FLUX, FLUX2, CHROMA = _flux(_APART, _RESIDUALS), _flux(_TOGETHER, {}), _flux(_TOGETHER, _RESIDUALS)

QWEN_IMAGE = _blocks(
    "transformer_blocks",
    {
        **_APART,
        "encoder_hidden_states_mask": Along(TEXT),
        "image_rotary_emb": (Along(IMAGE, 0), Along(TEXT, 0)),
        "modulate_index": Along(IMAGE),
    },
    TEXT + IMAGE,
    ("temb", "joint_attention_kwargs"),
)

SD3 = _blocks("transformer_blocks", _APART, IMAGE + TEXT, ("temb", "joint_attention_kwargs"), within={"attn2": IMAGE})

LUMINA2 = _blocks(
    "layers",
    {"hidden_states": Tokens(JOINT), "attention_mask": Along(JOINT), "image_rotary_emb": Along(JOINT)},
    JOINT,
    ("temb",),
    before=_refiner("hidden_states", "image_rotary_emb", ("temb",)),
)

Z_IMAGE_WHOLE = ("attn_mask", "adaln_input")
Z_IMAGE = _blocks(
    "layers",
    {"x": Tokens(JOINT), "freqs_cis": Along(JOINT)},
    JOINT,
    Z_IMAGE_WHOLE,
    before=_refiner("x", "freqs_cis", Z_IMAGE_WHOLE),
    last="all_final_layer.2-1",
)


def _rope(streams: Names, dim: int) -> tuple[Along, Along]:
    """Cosines and sines."""
    return Along(streams, dim), Along(streams, dim)


def _video(stack: str, args: Mapping[str | int, Word], *whole: str) -> Plan:
    """Of video alone; the text is read as keys."""
    own = {"hidden_states": Tokens(VIDEO), **args}
    return _blocks(stack, own, VIDEO, ("encoder_hidden_states", *whole), within={"attn2": "local"})


WAN = _video("blocks", {"temb": Along(VIDEO, ndim=4), "rotary_emb": _rope(VIDEO, 1)})

# Tokens of the past come first; how many those of today are is told to every block.
HELIOS = _video(
    "blocks",
    {
        "temb": Along(VIDEO, ndim=4),
        "rotary_emb": Along(VIDEO),
        "original_context_length": Index("video", to_end=True),
    },
)

LTX_VIDEO = _video(
    "transformer_blocks", {"temb": Along(VIDEO), "image_rotary_emb": _rope(VIDEO, -2)}, "encoder_attention_mask"
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
HUNYUAN_VIDEO_15 = _blocks(
    "transformer_blocks", HUNYUAN_TOKENS | {"attention_mask": Along(TEXT)}, IMAGE + TEXT, ("temb",)
)

# Text, pictures, audio and video are one row of tokens.
MINIMAX_H3 = _blocks(
    "transformer_blocks",
    {"hidden_states": Tokens(JOINT), "adaln_indices": Along(JOINT, 0), "rotary_emb": _rope(JOINT, 0)},
    JOINT,
    ("temb",),
)

PLANS = {
    "ChromaTransformer2DModel": CHROMA,
    "ChronoEditTransformer3DModel": WAN,
    "Flux2Transformer2DModel": FLUX2,
    "FluxTransformer2DModel": FLUX,
    "HeliosTransformer3DModel": HELIOS,
    "HunyuanVideo15Transformer3DModel": HUNYUAN_VIDEO_15,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "LTX2VideoTransformer3DModel": LTX2,
    "LTXVideoTransformer3DModel": LTX_VIDEO,
    "Lumina2Transformer2DModel": LUMINA2,
    "MiniMaxH3Transformer3DModel": MINIMAX_H3,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "SD3Transformer2DModel": SD3,
    "WanTransformer3DModel": WAN,
    "ZImageTransformer2DModel": Z_IMAGE,
}
