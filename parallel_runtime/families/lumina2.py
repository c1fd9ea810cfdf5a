"""What tests/engine reads of diffusers' Lumina2, until the engine has it."""

from __future__ import annotations

from ..old_plan import Blocks, Gather, Plan, Split


class Lumina2:
    blocks = Blocks(stacks={"layers": ("hidden_states",)}, stream="sequence")


def plan(refiners: int) -> Plan:
    """The text is refined whole on every rank; image and sequence are cut, and put together after their last layer.

    A sequence is an item's text and image without a gap, padded at the end where another item has more text.
    """
    return Plan(
        inputs={
            "noise_refiner.0": {"hidden_states": Split(dim=1, stream="image")},
            "noise_refiner.*": {"image_rotary_emb": Split(dim=1, stream="image")},
            "layers.0": {"hidden_states": Split(dim=1, stream="sequence")},
            "layers.*": {
                "attention_mask": Split(dim=1, stream="sequence"),
                "image_rotary_emb": Split(dim=1, stream="sequence"),
            },
        },
        outputs={
            f"noise_refiner.{refiners - 1}": Gather(dim=1, stream="image"),
            "norm_out": Gather(dim=1, stream="sequence"),
        },
        joint=("sequence",),
        attention={"noise_refiner.*.attn": ("image",), "context_refiner.*.attn": "local"},
    )
