"""Three small nodes of the embedded demo model: its MODEL, words to CONDITIONING, LATENT to IMAGE."""

from __future__ import annotations

from typing import Any

import comfy.sd
from comfy_api.latest import io

from ...parallel_runtime.demo import MODEL, words_and_pictures
from .cp_config import CATEGORY


class CPDemoModel(io.ComfyNode):
    """Loads the embedded model, which ComfyUI does not list: a workflow could choose it by accident."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPDemoModel",
            display_name="CP Demo Model",
            category=f"{CATEGORY}/demo",
            description="The small model that comes with this pack: 128 x 128 pixels, drawn shapes, no download.",
            inputs=[],
            outputs=[io.Model.Output(tooltip="For every sampler, with CP Demo Conditioning and CP Demo Decode.")],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(comfy.sd.load_diffusion_model(str(MODEL)))


class CPDemoConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPDemoConditioning",
            display_name="CP Demo Conditioning",
            category=f"{CATEGORY}/demo",
            description="Words that the embedded demo model knows, such as: a red circle on a white background.",
            inputs=[
                io.String.Input(
                    "text", default="a red circle", multiline=True, tooltip="What to draw: size, colour, shape, where."
                )
            ],
            outputs=[io.Conditioning.Output(tooltip="For the demo model only.")],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        cross_attn, pooled = words_and_pictures.encode(text)
        return io.NodeOutput([[cross_attn, {"pooled_output": pooled}]])


class CPDemoDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPDemoDecode",
            display_name="CP Demo Decode",
            category=f"{CATEGORY}/demo",
            description="Turns the embedded demo model's LATENT into an IMAGE.",
            inputs=[io.Latent.Input("samples", tooltip="A latent of the demo model.")],
            outputs=[io.Image.Output(tooltip="The picture.")],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput(words_and_pictures.decode(samples["samples"]))
