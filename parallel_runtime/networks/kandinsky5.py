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
)

NETWORK = Network(
    name="Kandinsky 5",
    kinds=("comfy.ldm.kandinsky5.model:Kandinsky5",),
    plan=PLAN,
)
