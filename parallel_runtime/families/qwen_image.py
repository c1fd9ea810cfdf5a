"""What tests/engine reads of diffusers' QwenImage, until the engine has it."""

from __future__ import annotations

from ..old_plan import Blocks


class QwenImage:
    blocks = Blocks(stacks={"transformer_blocks": ("encoder_hidden_states", "hidden_states")})
