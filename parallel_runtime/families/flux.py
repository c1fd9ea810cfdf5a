"""What tests/engine reads of diffusers' Flux, until the engine has it."""

from __future__ import annotations

from ..old_plan import Blocks


class Flux:
    blocks = Blocks(
        stacks={
            "transformer_blocks": ("encoder_hidden_states", "hidden_states"),
            "single_transformer_blocks": ("encoder_hidden_states", "hidden_states"),
        }
    )
