"""Networks whose tokens are one stream: pictures with their text, of which some are language models that make pictures;
then sounds, and a shape in three dimensions that is made of points."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .split_plan import (
    AUDIO,
    IMAGE,
    JOINT,
    TEXT,
    Architecture,
    Count,
    Cross,
    Gather,
    HeadFunction,
    Index,
    ModulePlan,
    Names,
    Slices,
    Split,
    SplitLike,
    SplitPlan,
    Window,
    inputs_of,
)

# ERNIE-Image: image and text in one stream. Its attention is called without transformer_options.
ERNIE_IMAGE_BLOCKS = ModulePlan(
    "layers", {"x": Split(JOINT), "rotary_pos_emb": SplitLike(JOINT)}, attends=JOINT, unsplit_args=("temb",)
)
ERNIE_IMAGE = Architecture(
    name="ERNIE-Image",
    kinds=("comfy.ldm.ernie.model:ErnieImageModel",),
    plan=SplitPlan(
        (ERNIE_IMAGE_BLOCKS, ModulePlan("final_linear", {0: Gather(JOINT, after=True)})),
        no_options=("comfy.ldm.ernie.model",),
    ),
)

# HiDream O1: a language model that makes pictures. What comes before the picture is full on every rank and attends to
# nothing behind it; it is left out where the layers kept its keys at an earlier step.
PREFIX = ("prefix",)
PREFIX_IMAGE = PREFIX + IMAGE
HIDREAM_O1_LENGTHS = ModulePlan("", {"ar_len": Count(PREFIX), "position_ids": Count(PREFIX_IMAGE)})
HIDREAM_O1_LAYERS = ModulePlan(
    "language_model.layers",
    {"x": [Split(PREFIX_IMAGE), Split(IMAGE)], "freqs_cis": [SplitLike(PREFIX_IMAGE, -2), SplitLike(IMAGE, -2)]},
    attends=Cross(queries=IMAGE, keys=PREFIX_IMAGE),
    unsplit_args=("attention_mask", "optimized_attention", "past_key_value"),
    gathers=True,
    never_skipped=True,  # layers return their keys too
    updates=(),  # and keep them from step to step
)
HIDREAM_O1 = Architecture(
    name="HiDream O1",
    kinds=("comfy.ldm.hidream_o1.model:HiDreamO1Transformer",),
    plan=SplitPlan((HIDREAM_O1_LENGTHS, HIDREAM_O1_LAYERS), replicated=frozenset(PREFIX)),
    width=lambda net: net.text_config.num_attention_heads * net.text_config.head_dim,
    prompt="prefix",
)

# Ideogram 4: text and image in one stream, or the image alone.
IDEOGRAM4_BLOCKS = ModulePlan(
    "layers",
    {"x": Split(JOINT), "freqs_cis": SplitLike(JOINT), "adaln_input": SplitLike(JOINT)},
    attends=JOINT,
    unsplit_args=("attn_mask",),
)
IDEOGRAM4_LAST = ModulePlan("final_layer", {"x": Gather(JOINT, after=True), "c": SplitLike(JOINT)})
IDEOGRAM4 = Architecture(
    name="Ideogram 4",
    kinds=("comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel",),
    plan=SplitPlan((IDEOGRAM4_BLOCKS, IDEOGRAM4_LAST)),
    width=lambda net: net.input_proj.out_features,
    text_width=inputs_of("llm_cond_proj"),
    patch=(1, 1, 1),
)

# Krea 2: text and image in one stream.
KREA2_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(JOINT), "freqs": SplitLike(JOINT, 2), "timestep_zero_index": Index("joint")},
    attends=JOINT,
    unsplit_args=("vec",),
)
KREA2 = Architecture(
    name="Krea 2",
    kinds=("comfy.ldm.krea2.model:SingleStreamDiT",),
    plan=SplitPlan((KREA2_BLOCKS, ModulePlan("last", {"x": Gather(JOINT, after=True)}, unsplit_args=("tvec",)))),
    width=lambda net: net.first.out_features,
    patch=(1, 2, 2),
)

# Lumina 2 and Z-Image: text and image in one stream, after a refiner of the image alone.
#
# Z-Image on patches of pixels slices the text off right after the blocks; its decoder of pixels runs in full on every
# rank.
LUMINA_REFINER = ModulePlan(
    "noise_refiner",
    {"x": Split(IMAGE), "freqs_cis": SplitLike(IMAGE), "timestep_zero_index": Slices(IMAGE)},
    attends=IMAGE,
    unsplit_args=("adaln_input",),
    gathers=True,
    never_skipped=True,
)
LUMINA_LAYERS = ModulePlan(
    "layers",
    {"x": Split(JOINT), "freqs_cis": SplitLike(JOINT), "timestep_zero_index": Slices(JOINT)},
    attends=JOINT,
    unsplit_args=("adaln_input",),
)
LUMINA_LAST = ModulePlan(
    "final_layer", {"x": Gather(JOINT, after=True), "timestep_zero_index": Slices(JOINT)}, unsplit_args=("c",)
)
LUMINA = Architecture(
    name="Lumina 2 or Z-Image",
    kinds=("comfy.ldm.lumina.model:NextDiT",),
    plan=SplitPlan((LUMINA_REFINER, LUMINA_LAYERS, LUMINA_LAST)),
)
LUMINA_PIXELS = replace(
    LUMINA,
    name="Z-Image in pixels",
    kinds=("comfy.ldm.lumina.model:NextDiTPixelSpace",),
    plan=SplitPlan((LUMINA_REFINER, replace(LUMINA_LAYERS, gathers=True))),
)

# OmniGen 2: refiners of the image and of references, then one stream of all. Boogu has the same refiners, and blocks
# of two streams, which attend twice, before those of one.
REFERENCES = ("references",)
IMAGES = ("images",)  # of references and the one that is made


def one_stream(name: str, streams: Names, **more: Any) -> ModulePlan:
    return ModulePlan(
        name,
        {"hidden_states": Split(streams), "image_rotary_emb": SplitLike(streams)},
        attends=streams,
        unsplit_args=("temb",),
        **more,
    )


OMNIGEN2_REFINERS = (
    one_stream("noise_refiner", IMAGE, gathers=True, never_skipped=True),
    one_stream(
        "ref_image_refiner",
        REFERENCES,
        gathers=True,
        never_skipped=True,
        # The last refiners are in one stage, which must have all tokens that are joined next.
        runs_with=lambda net: [len(net.noise_refiner) - 1] * len(net.ref_image_refiner),
    ),
)
OMNIGEN2_LAST = ModulePlan("norm_out", {"x": Gather(JOINT, after=True)}, unsplit_args=("conditioning_embedding",))

OMNIGEN2 = Architecture(
    name="OmniGen 2",
    kinds=("comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel",),
    plan=SplitPlan((*OMNIGEN2_REFINERS, one_stream("layers", JOINT), OMNIGEN2_LAST)),
)

OMNIGEN2_DOUBLE = ModulePlan(
    "double_stream_layers",
    {
        "img_hidden_states": Split(IMAGES),
        "instruct_hidden_states": Split(TEXT),
        "joint_rotary_emb": SplitLike(TEXT + IMAGES),
        "img_rotary_emb": SplitLike(IMAGES),
    },
    attends=[TEXT + IMAGES, IMAGES],
    unsplit_args=("temb",),
    gathers=True,
)
BOOGU = Architecture(
    name="Boogu",
    kinds=("comfy.ldm.boogu.model:BooguTransformer2DModel",),
    plan=SplitPlan((*OMNIGEN2_REFINERS, OMNIGEN2_DOUBLE, one_stream("single_stream_layers", JOINT), OMNIGEN2_LAST)),
)

# Qwen-Image 2.1: text, references and image in one stream. Blocks are given a function that attends, by segments, and
# may keep keys of all that comes before the image: then these tokens go through each block first, the image's after
# them.
QWEN_IMAGE21_BLOCKS = ModulePlan(
    "transformer_blocks",
    {"x": Split(JOINT), "pe": SplitLike(JOINT), "prefix_len": Index("joint")},
    head_functions={"attn_fn": HeadFunction()},
    unsplit_args=("mod",),
    gathers=True,
    never_skipped=True,
    updates=(),  # each stage would need the keys that are kept
)
QWEN_IMAGE21 = Architecture(
    name="Qwen-Image 2.1",
    kinds=("comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel",),
    plan=SplitPlan((QWEN_IMAGE21_BLOCKS,), in_turns=JOINT, agreed=("select_prefix_cache",)),
    patch=(1, 1),
    text_width=inputs_of("txt_in.in_layer"),
)

# SenseNova U1.5: a language model that makes pictures in pixels. What comes before the picture is full on every rank,
# and goes through methods of its own of the same layers.
SENSENOVA_LAYERS = "language_model.model.layers"
SENSENOVA_IMAGE_LAYERS = ModulePlan(
    SENSENOVA_LAYERS,
    {"image": Split(IMAGE), "image_rope": SplitLike(IMAGE, 2), "prefix_key": Count(PREFIX, 2)},
    attends=Cross(queries=IMAGE, keys=PREFIX + IMAGE),
    unsplit_args=("prefix_value",),
    gathers=True,
    method="forward_generation",
    never_skipped=True,
    updates=(),
)
SENSENOVA = Architecture(
    name="SenseNova U1.5",
    kinds=("comfy.ldm.sensenova.model:SenseNovaU15",),
    plan=SplitPlan(
        (ModulePlan(SENSENOVA_LAYERS, attends="local", method="forward_prefix"), SENSENOVA_IMAGE_LAYERS),
        replicated=frozenset(PREFIX),
    ),
    patch=(32, 32),
    prompt="prefix",
    width=lambda net: net.language_model.model.layers[0].self_attn.q_proj.out_features,
    head_size=lambda net: 2 * net.language_model.model.layers[0].self_attn.q_norm.weight.shape[0],
)

# ACE-Step. The attention of version 1 is linear: a sum of values times keys over all tokens; its feed-forward layers
# convolve along them. In version 1.5 half of the layers attend in a window, and none is given transformer_options.
ACE_STEP_V1_BLOCKS = ModulePlan(
    "transformer_blocks",
    {"hidden_states": Split(AUDIO), "rotary_freqs_cis": (SplitLike(AUDIO, 0), SplitLike(AUDIO, 0))},
    submodule_attends={"cross_attn": "local"},
    token_functions={"attn": "sum", "ff.depth_conv": "convolution"},
    unsplit_args=("encoder_hidden_states", "rotary_freqs_cis_cross", "temb"),
)
ACE_STEP_V1_LAST = ModulePlan("final_layer.linear", {0: Gather(AUDIO, after=True)})
ACE_STEP_V1 = Architecture(
    name="ACE-Step",
    kinds=("comfy.ldm.ace.model:ACEStepTransformer2DModel",),
    plan=SplitPlan((ACE_STEP_V1_BLOCKS, ACE_STEP_V1_LAST)),
    patch=lambda net: (net.patch_size[0], net.patch_size[1]),
)

ACE_STEP_V1_5_BLOCKS = ModulePlan(
    "decoder.layers",
    {"hidden_states": Split(AUDIO), "position_embeddings": SplitLike(AUDIO, -2)},
    submodule_attends={"self_attn": Window(streams=AUDIO, width="sliding_window"), "cross_attn": "local"},
    unsplit_args=("temb", "encoder_hidden_states"),
    gathers=True,
)
ACE_STEP_V1_5 = Architecture(
    name="ACE-Step 1.5",
    kinds=("comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel",),
    plan=SplitPlan((ACE_STEP_V1_5_BLOCKS,), no_options=("comfy.ldm.ace.ace_step15",)),
    width=lambda net: net.decoder.layers[0].self_attn.num_heads * net.decoder.layers[0].self_attn.head_dim,
    patch=lambda net: (net.decoder.patch_size,),
)

# MiniMax Music 3: it runs over windows of a long piece, one after the other. Its attention is called without
# transformer_options.
MINIMAX_MUSIC_LAYERS = ModulePlan(
    "diffusion_transformer.transformer.layers",
    {"x": Split(AUDIO, repeats=True), "rotation_matrix": SplitLike(AUDIO, 2)},
    attends=AUDIO,
    gathers=True,
    never_skipped=True,  # a window is not what the one before was
)
MINIMAX_MUSIC = Architecture(
    name="MiniMax Music 3",
    kinds=("comfy.ldm.minimax_music.dit:MiniMaxMusic3DiT",),
    plan=SplitPlan((MINIMAX_MUSIC_LAYERS,), no_options=("comfy.ldm.minimax_music.dit",)),
    width=lambda net: net.diffusion_transformer.transformer.project_in.out_features,
    patch=(1,),
)

# Stable Audio: one stream, with what stands for the whole of it in front.
STABLE_AUDIO_LAYERS = ModulePlan(
    "transformer.layers",
    {"x": Split(AUDIO), "rotary_pos_emb": (SplitLike(AUDIO, 0), None), "local_add_cond": SplitLike(AUDIO, at_end=True)},
    attends=AUDIO,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("context", "global_cond"),
    gathers=True,
)
STABLE_AUDIO = Architecture(
    name="Stable Audio",
    kinds=("comfy.ldm.audio.dit:AudioDiffusionTransformer",),
    plan=SplitPlan((STABLE_AUDIO_LAYERS,)),
    width=lambda net: net.transformer.dim,
    fits=lambda net: (
        not any(getattr(part, "feat_scale", False) or hasattr(part, "depthwise_conv") for part in net.modules())
    ),
)

# TripoSplat: points of a shape, a picture and a camera in one stream, after a refiner of the points; that of the
# picture is computed in full by every rank. Rotations are made of hidden states between blocks, so from the second
# block on a rank makes those of its own tokens.
POINTS = ("points",)
TRIPOSPLAT_REFINER = ModulePlan(
    "noise_refiner",
    {"x": Split(POINTS), "rotary_emb": Split(POINTS)},
    attends=POINTS,
    unsplit_args=("mod",),
    gathers=True,
    updates=("x",),
    never_skipped=True,
)
TRIPOSPLAT_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(JOINT), "rotary_emb": Split(JOINT)},
    attends=JOINT,
    unsplit_args=("mod",),
    gathers=True,
    updates=("x",),
)


class SplatArchitecture(Architecture):
    """An Architecture whose latent is [B, points, C], beside a camera of one token."""

    def tokens(self, net: Any, latent_shape: Sequence[int], text: int) -> dict[str, int]:
        return {self.plan.main_stream: latent_shape[1] + text + 1}


TRIPOSPLAT = SplatArchitecture(
    name="TripoSplat",
    kinds=("comfy.ldm.triposplat.model:LatentSeqMMFlowModel",),
    plan=SplitPlan((TRIPOSPLAT_REFINER, TRIPOSPLAT_BLOCKS)),
    text_width=inputs_of("cond_embedder"),
)
