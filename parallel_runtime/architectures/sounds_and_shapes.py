"""Networks of sound, and of shapes in three dimensions that are made of points. Hunyuan 3D stands with the networks of
pictures whose blocks it has."""

from collections.abc import Sequence
from typing import Any

from .architecture import Architecture, inputs_of
from .split_plan import AUDIO, JOINT, Gather, ModulePlan, Split, SplitLike, SplitPlan, Window

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
