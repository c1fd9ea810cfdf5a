"""Conditioning that core nodes make with an encoder or a VAE, here without either."""

from __future__ import annotations

from typing import Any

import comfy.clip_vision
import comfy.conds
import torch
from comfy_api.latest import io


class OddCondition(io.ComfyNode):
    """CONDITIONING with something in it, by `kind`: nothing at all, gligen boxes, a reference image, clip vision,
    masks of the text that are none, an input of the network that a node has made already."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestOddCondition",
            category="cp test",
            is_dev_only=True,
            inputs=[io.Conditioning.Input("conditioning"), io.String.Input("kind")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: list[list[Any]], kind: str) -> io.NodeOutput:
        if kind == "empty":
            return io.NodeOutput([])
        added = _added(kind, torch.Generator().manual_seed(5))
        return io.NodeOutput([[text, {**options, **added}] for text, options in conditioning])


def _added(kind: str, dice: torch.Generator) -> dict[str, Any]:
    match kind:
        case "soft mask":
            return {"attention_mask": torch.ones(1, 20)}
        case "short mask":
            return {"attention_mask": torch.ones(1, 3, dtype=torch.long)}
        case "concat":
            return {"concat_latent_image": torch.randn(1, 16, 16, 24, generator=dice)}
        case "gligen":
            return {"gligen": ("position", None, [])}
        case "reference":
            return {"reference_latents": [torch.randn(1, 16, 8, 8, generator=dice)]}
        case "made already":
            return {"model_conds": {"ref_latents": comfy.conds.CONDList([torch.randn(1, 16, 8, 8, generator=dice)])}}
        case "clip_vision":
            seen = comfy.clip_vision.Output()
            seen["penultimate_hidden_states"] = torch.randn(1, 257, 1280, generator=dice)
            return {"clip_vision_output": seen, "concat_latent_image": torch.randn(1, 16, 3, 8, 10, generator=dice)}
    raise ValueError(kind)
