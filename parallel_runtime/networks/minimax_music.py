"""MiniMax Music 3: it runs over windows of a long piece, one after the other. Its attention is called without
transformer_options."""

from ..plan import AUDIO, Along, Plan, Site, Tokens
from .network import Network

NETWORK = Network(
    name="MiniMax Music 3",
    kinds=("comfy.ldm.minimax_music.dit:MiniMaxMusic3DiT",),
    plan=Plan(
        (
            Site(
                "diffusion_transformer.transformer.layers",
                {"x": Tokens(AUDIO, again=True), "rotation_matrix": Along(AUDIO, 2)},
                attends=AUDIO,
                gathers=True,
                aside=True,  # a window is not what the one before was
            ),
        ),
        no_options=("comfy.ldm.minimax_music.dit",),
    ),
    width=lambda net: net.diffusion_transformer.transformer.project_in.out_features,
    patch=(1,),
)
