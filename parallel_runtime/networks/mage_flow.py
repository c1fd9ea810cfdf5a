"""Mage-Flow: Qwen-Image's blocks."""

from . import qwen_image
from .network import Network, image, inputs_of, layers

NETWORK = Network(
    name="Mage-Flow",
    kinds=("comfy.ldm.mage_flow.model:MageFlowTransformer2DModel",),
    plan=qwen_image.PLAN,
    heads=lambda net: net.transformer_blocks[0].attn.heads,
    width=lambda net: net.inner_dim,
    text_width=inputs_of("txt_in"),
    layers=layers("transformer_blocks"),
    tokens=image(1),
)
