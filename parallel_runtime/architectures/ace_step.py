"""ACE-Step. The attention of version 1 is linear: a sum of values times keys over all tokens; its feed-forward layers
convolve along them. In version 1.5 half of the layers attend in a window, and none is given transformer_options."""

from .architecture import Architecture
from .split_plan import AUDIO, Gather, ModulePlan, Split, SplitLike, SplitPlan, Window

V1_BLOCKS = ModulePlan(
    "transformer_blocks",
    {"hidden_states": Split(AUDIO), "rotary_freqs_cis": (SplitLike(AUDIO, 0), SplitLike(AUDIO, 0))},
    submodule_attends={"cross_attn": "local"},
    token_functions={"attn": "sum", "ff.depth_conv": "convolution"},
    unsplit_args=("encoder_hidden_states", "rotary_freqs_cis_cross", "temb"),
)
V1_LAST = ModulePlan("final_layer.linear", {0: Gather(AUDIO, after=True)})
V1 = Architecture(
    name="ACE-Step",
    kinds=("comfy.ldm.ace.model:ACEStepTransformer2DModel",),
    plan=SplitPlan((V1_BLOCKS, V1_LAST)),
    patch=lambda net: (net.patch_size[0], net.patch_size[1]),
)

V1_5_BLOCKS = ModulePlan(
    "decoder.layers",
    {"hidden_states": Split(AUDIO), "position_embeddings": SplitLike(AUDIO, -2)},
    submodule_attends={"self_attn": Window(streams=AUDIO, width="sliding_window"), "cross_attn": "local"},
    unsplit_args=("temb", "encoder_hidden_states"),
    gathers=True,
)
V1_5 = Architecture(
    name="ACE-Step 1.5",
    kinds=("comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel",),
    plan=SplitPlan((V1_5_BLOCKS,), no_options=("comfy.ldm.ace.ace_step15",)),
    width=lambda net: net.decoder.layers[0].self_attn.num_heads * net.decoder.layers[0].self_attn.head_dim,
    patch=lambda net: (net.decoder.patch_size,),
)
