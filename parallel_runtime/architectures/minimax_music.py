"""MiniMax Music 3: it runs over windows of a long piece, one after the other. Its attention is called without
transformer_options."""

from .architecture import Architecture
from .split_plan import AUDIO, ModulePlan, Split, SplitLike, SplitPlan

LAYERS = ModulePlan(
    "diffusion_transformer.transformer.layers",
    {"x": Split(AUDIO, repeats=True), "rotation_matrix": SplitLike(AUDIO, 2)},
    attends=AUDIO,
    gathers=True,
    never_skipped=True,  # a window is not what the one before was
)
NETWORK = Architecture(
    name="MiniMax Music 3",
    kinds=("comfy.ldm.minimax_music.dit:MiniMaxMusic3DiT",),
    plan=SplitPlan((LAYERS,), no_options=("comfy.ldm.minimax_music.dit",)),
    width=lambda net: net.diffusion_transformer.transformer.project_in.out_features,
    patch=(1,),
)
