"""What tests/engine reads of diffusers' Wan, until the engine has it."""

from __future__ import annotations

from ..old_plan import Blocks


class Wan:
    blocks = Blocks(stacks={"blocks": ("hidden_states",)})
