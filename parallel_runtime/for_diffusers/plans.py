"""The plans of diffusers' transformers: class name to SplitPlan, on diffusers' names. Imports no diffusers.

Its own `_cp_plan`s say which tensors are split, not over which split streams an attention runs; and some split what
must stay full, or leave out what must be split. A class that is not here is refused: guessing would be silently wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..architectures.split_plan import (
    AUDIO,
    IMAGE,
    JOINT,
    TEXT,
    VIDEO,
    Count,
    Cross,
    Gather,
    Index,
    ModulePlan,
    Names,
    Split,
    SplitLike,
    SplitPlan,
    SplitSpec,
)

Args = Mapping[str | int, SplitSpec]
Plans = tuple[ModulePlan, ...]


def plan_of(transformer: nn.Module) -> SplitPlan:
    """Returns the SplitPlan of a transformer's class; raises ValueError if we do not know it."""
    for kind in type(transformer).__mro__:  # FSDP makes a subclass of each module's class
        if kind.__name__ in PLANS:
            return PLANS[kind.__name__]
    name, known = type(transformer).__name__, ", ".join(PLANS)
    raise ValueError(f"no context-parallel plan is known for {name} (known: {known}); pass plan=SplitPlan(...)")


def _blocks(
    stack: str, args: Args, attends: Names, unsplit: Names, before: Plans = (), last: str = "norm_out", **more: Any
) -> SplitPlan:
    """Returns the plan of a stack of blocks, the modules `before` it, and the `last` layer, on the latent in full."""
    module_plans = (*before, ModulePlan(stack, args, attends, unsplit_args=unsplit, **more))
    return SplitPlan((*module_plans, ModulePlan(last, {0: Gather((SplitPlan(module_plans).main_stream,))})))


def _refiner(argument: str, positions: str, unsplit: Names) -> Plans:
    """Returns the plan of the refiner of image tokens, before text and image are one stream."""
    args: Args = {argument: Split(IMAGE), positions: SplitLike(IMAGE)}
    return (ModulePlan("noise_refiner", args, IMAGE, unsplit_args=unsplit, gathers=True, never_skipped=True),)


def _added(argument: str, streams: Names, *unsplit: str) -> ModulePlan:
    """Returns the plan of a transformer that adds a ControlNet's residuals to tokens of these streams.

    They are given in a list or by block, before there are tokens, whose number they tell. Tokens are split before they
    are added."""

    def split_residuals(residuals: Any, split: Callable[[Any, SplitSpec], Any]) -> Any:
        numbers = [*residuals] if isinstance(residuals, dict) else None
        values = [*(residuals.values() if numbers is not None else residuals)]
        if values[0].shape[1] > 1:  # else one for all tokens
            split(values[0], Count(streams, 1))
        parts = split(values, SplitLike(streams))
        return parts if numbers is None else dict(zip(numbers, parts, strict=True))

    inputs = (*unsplit, "hidden_states", "encoder_hidden_states", "timestep", "return_dict")
    return ModulePlan("", {argument: split_residuals}, unsplit_args=inputs)


_RESIDUALS: Args = dict.fromkeys(("controlnet_block_samples", "controlnet_single_block_samples"), SplitLike(IMAGE))
_TWO_STREAMS: Args = {"encoder_hidden_states": Split(TEXT), "hidden_states": Split(IMAGE)}
_ONE_STREAM: Args = {"hidden_states": Split(TEXT + IMAGE)}
# In the order in which these transformers and blocks return them, which is that of their specs.
_IMAGE_FIRST: dict[str | int, SplitSpec] = {"hidden_states": Split(IMAGE), "encoder_hidden_states": Split(TEXT)}
_IDS: Args = {**_IMAGE_FIRST, "img_ids": SplitLike(IMAGE, -2), "txt_ids": SplitLike(TEXT, -2)}


def _flux(single: Args, inputs: Args) -> SplitPlan:
    """Splits all inputs of the transformer; positions are computed from ids, which are split by then."""
    unsplit = ("timestep", "pooled_projections", "guidance", "joint_attention_kwargs", "attention_mask", "return_dict",
             "controlnet_blocks_repeat", "num_ref_tokens", "ref_fixed_timestep")  # fmt: skip
    of_blocks = ("temb", "temb_mod", "temb_mod_img", "temb_mod_txt", "image_rotary_emb", "joint_attention_kwargs",
                 "attention_mask")  # fmt: skip
    return SplitPlan(
        (
            ModulePlan("", {**_IDS, **inputs}, TEXT + IMAGE, unsplit_args=unsplit, never_skipped=True),
            ModulePlan("transformer_blocks", _TWO_STREAMS, unsplit_args=of_blocks),
            ModulePlan("single_transformer_blocks", single, unsplit_args=of_blocks),
            ModulePlan("proj_out", {0: Split(IMAGE)}, gathers=True, never_skipped=True),
        )
    )


FLUX, FLUX2, CHROMA = _flux(_TWO_STREAMS, _RESIDUALS), _flux(_ONE_STREAM, {}), _flux(_ONE_STREAM, _RESIDUALS)

QWEN_IMAGE = _blocks(
    "transformer_blocks",
    {
        **_TWO_STREAMS,
        "encoder_hidden_states_mask": SplitLike(TEXT),
        "image_rotary_emb": (SplitLike(IMAGE, 0), SplitLike(TEXT, 0)),
        "modulate_index": SplitLike(IMAGE),
    },
    TEXT + IMAGE,
    ("temb", "joint_attention_kwargs"),
    before=(
        _added("controlnet_block_samples", IMAGE, "encoder_hidden_states_mask", "img_shapes", "guidance",
               "attention_kwargs", "additional_t_cond"),
    ),
)  # fmt: skip

SD3 = _blocks(
    "transformer_blocks",
    _TWO_STREAMS,
    IMAGE + TEXT,
    ("temb", "joint_attention_kwargs"),
    before=(
        _added("block_controlnet_hidden_states", IMAGE, "pooled_projections", "joint_attention_kwargs", "skip_layers"),
    ),
    submodule_attends={"attn2": IMAGE},
)

LUMINA2 = _blocks(
    "layers",
    {"hidden_states": Split(JOINT), "attention_mask": SplitLike(JOINT), "image_rotary_emb": SplitLike(JOINT)},
    JOINT,
    ("temb",),
    before=_refiner("hidden_states", "image_rotary_emb", ("temb",)),
)

Z_IMAGE_UNSPLIT = ("attn_mask", "adaln_input")
Z_IMAGE = _blocks(
    "layers",
    {"x": Split(JOINT), "freqs_cis": SplitLike(JOINT)},
    JOINT,
    Z_IMAGE_UNSPLIT,
    before=(
        _added("controlnet_block_samples", JOINT, "x", "t", "cap_feats", "siglip_feats", "image_noise_mask",
               "patch_size", "f_patch_size", "joint_attention_kwargs"),
        *_refiner("x", "freqs_cis", Z_IMAGE_UNSPLIT),
    ),
    last="all_final_layer.2-1",
)  # fmt: skip


def _rope(streams: Names, dim: int) -> tuple[SplitLike, SplitLike]:
    """Returns the specs of a pair of cosines and sines."""
    return SplitLike(streams, dim), SplitLike(streams, dim)


def _video(stack: str, args: Args, *unsplit: str) -> SplitPlan:
    """Returns the plan of a stack over video tokens alone; text is read as keys."""
    split_args = {"hidden_states": Split(VIDEO), **args}
    return _blocks(stack, split_args, VIDEO, ("encoder_hidden_states", *unsplit), submodule_attends={"attn2": "local"})


WAN = _video("blocks", {"temb": SplitLike(VIDEO, ndim=4), "rotary_emb": _rope(VIDEO, 1)})

# Tokens of earlier frames come first; every block is given the number of the new ones.
NEW_TOKENS = Index("video", to_end=True)
HELIOS = _video(
    "blocks",
    {"temb": SplitLike(VIDEO, ndim=4), "rotary_emb": SplitLike(VIDEO), "original_context_length": NEW_TOKENS},
)

LTX_VIDEO = _video(
    "transformer_blocks", {"temb": SplitLike(VIDEO), "image_rotary_emb": _rope(VIDEO, -2)}, "encoder_attention_mask"
)

LTX2 = SplitPlan(
    (
        ModulePlan(
            "transformer_blocks",
            {
                "hidden_states": Split(VIDEO),
                "audio_hidden_states": Split(AUDIO),
                **dict.fromkeys(("temb", "temb_ca_scale_shift", "temb_ca_gate"), SplitLike(VIDEO)),
                **dict.fromkeys(("temb_audio", "temb_ca_audio_scale_shift", "temb_ca_audio_gate"), SplitLike(AUDIO)),
                **dict.fromkeys(("video_rotary_emb", "ca_video_rotary_emb"), _rope(VIDEO, -2)),
                **dict.fromkeys(("audio_rotary_emb", "ca_audio_rotary_emb"), _rope(AUDIO, -2)),
            },
            VIDEO,
            {
                "audio_attn1": AUDIO,
                "audio_to_video_attn": Cross(queries=VIDEO, keys=AUDIO),
                "video_to_audio_attn": Cross(queries=AUDIO, keys=VIDEO),
                "attn2": "local",
                "audio_attn2": "local",
            },
            unsplit_args=(
                "encoder_hidden_states", "audio_encoder_hidden_states", "temb_prompt", "temb_prompt_audio",
                "encoder_attention_mask", "audio_encoder_attention_mask", 
                "use_a2v_cross_attention", "use_v2a_cross_attention", "perturbation_mask", "all_perturbed",
            ),
        ),
        ModulePlan("norm_out", {0: Gather(VIDEO)}),
        ModulePlan("audio_norm_out", {0: Gather(AUDIO)}),
    ),
)  # fmt: skip

HUNYUAN_TOKENS = _IMAGE_FIRST | {4: _rope(IMAGE, 0)}
# The last two are for a first frame that is given.
HUNYUAN_SINGLE = ModulePlan(
    "single_transformer_blocks",
    HUNYUAN_TOKENS | {6: Index("image")},
    IMAGE + TEXT,
    unsplit_args=("temb", "attention_mask", "token_replace_emb"),
)
HUNYUAN_DOUBLE = replace(HUNYUAN_SINGLE, name="transformer_blocks")
HUNYUAN_VIDEO = SplitPlan((HUNYUAN_DOUBLE, HUNYUAN_SINGLE, ModulePlan("norm_out", {0: Gather(IMAGE)})))
# The three kinds of text and the padding between them are put into one row before the blocks: one stream from there.
HUNYUAN_VIDEO_15 = _blocks(
    "transformer_blocks", HUNYUAN_TOKENS | {"attention_mask": SplitLike(TEXT)}, IMAGE + TEXT, ("temb",)
)

# Text, pictures, audio and video are one row of tokens.
MINIMAX_H3 = _blocks(
    "transformer_blocks",
    {"hidden_states": Split(JOINT), "adaln_indices": SplitLike(JOINT, 0), "rotary_emb": _rope(JOINT, 0)},
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
