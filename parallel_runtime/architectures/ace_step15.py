"""ACE-Step 1.5. Half of its layers attend in a window. Its attention is called without transformer_options."""

from .architecture import Architecture
from .split_plan import AUDIO, ModulePlan, Split, SplitLike, SplitPlan, Window

NETWORK = Architecture(
    name="ACE-Step 1.5",
    kinds=("comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel",),
    plan=SplitPlan(
        (
            ModulePlan(
                "decoder.layers",
                {"hidden_states": Split(AUDIO), "position_embeddings": SplitLike(AUDIO, -2)},
                submodule_attends={"self_attn": Window(streams=AUDIO, width="sliding_window"), "cross_attn": "local"},
                unsplit_args=("temb", "encoder_hidden_states"),
                gathers=True,
            ),
        ),
        no_options=("comfy.ldm.ace.ace_step15",),
    ),
    width=lambda net: net.decoder.layers[0].self_attn.num_heads * net.decoder.layers[0].self_attn.head_dim,
    patch=lambda net: (net.decoder.patch_size,),
)
