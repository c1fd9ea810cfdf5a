"""What tests/engine reads of diffusers' SD3, until the engine has it."""

from __future__ import annotations

from ..old_plan import Blocks, Gather, Plan, Split


class SD3:
    blocks = Blocks(stacks={"transformer_blocks": ("encoder_hidden_states", "hidden_states")})


def plan(dual: bool) -> Plan:
    """Positions are added before the cut, on the whole latent. `dual`: some blocks attend over the image once more."""
    return Plan(
        outputs_split={
            "pos_embed": {0: Split(dim=1, stream="image")},
            "context_embedder": {0: Split(dim=1, stream="text")},
        },
        outputs={"proj_out": Gather(dim=1, stream="image")},
        joint=("image", "text"),
        attention={"transformer_blocks.*.attn2": ("image",)} if dual else {},
    )
