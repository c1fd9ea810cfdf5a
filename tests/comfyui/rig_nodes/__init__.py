"""Test-only ComfyUI nodes: conditioning, latents and model patches without text encoders, VAEs or downloads."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .graph_ends import Conditioning, Latent, SaveLatent, Wait
from .refusables import AttentionPatch, Control, ForeignWrapper
from .tiny_override import install_tiny_override

install_tiny_override()


class TestNodes(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [Conditioning, Latent, SaveLatent, Wait, AttentionPatch, Control, ForeignWrapper]


async def comfy_entrypoint() -> ComfyExtension:
    return TestNodes()
