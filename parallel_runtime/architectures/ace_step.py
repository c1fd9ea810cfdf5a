"""ACE-Step 1. Its attention is linear: a sum of values times keys over all tokens. Its feed-forward layers convolve
along them."""

from .architecture import Architecture
from .split_plan import AUDIO, ModulePlan, Split, SplitLike, SplitPlan, TokenConvolution, TokenSum

NETWORK = Architecture(
    name="ACE-Step",
    kinds=("comfy.ldm.ace.model:ACEStepTransformer2DModel",),
    plan=SplitPlan(
        (
            ModulePlan(
                "transformer_blocks",
                {"hidden_states": Split(AUDIO), "rotary_freqs_cis": (SplitLike(AUDIO, 0), SplitLike(AUDIO, 0))},
                submodule_attends={"cross_attn": "local"},
                token_functions={"attn": TokenSum(*AUDIO), "ff.depth_conv": TokenConvolution(*AUDIO)},
                unsplit_args=("encoder_hidden_states", "rotary_freqs_cis_cross", "temb"),
                gathers=True,
            ),
        ),
    ),
    patch=lambda net: (net.patch_size[0], net.patch_size[1]),
)
