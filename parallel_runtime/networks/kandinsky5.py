"""Kandinsky 5 (image and video). The text has blocks of its own, whole on every rank."""

from ..plan import VIDEO, Along, Plan, Site, Tokens
from .network import Network

PLAN = Plan(
    (
        Site(
            "visual_transformer_blocks",
            {"visual_embed": Tokens(VIDEO), "freqs": Along(VIDEO)},
            attends=VIDEO,
            within={"cross_attention": "local"},
            whole=("text_embed", "time_embed"),
            gathers=True,
        ),
    ),
    main="video",
)

NETWORK = Network(
    name="Kandinsky 5",
    kinds=("comfy.ldm.kandinsky5.model:Kandinsky5",),
    plan=PLAN,
    heads=lambda net: net.visual_transformer_blocks[0].self_attention.num_heads,
    width=lambda net: net.model_dim,
    patch=(1, 2, 2),
)
