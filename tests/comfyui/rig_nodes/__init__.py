"""Test-only ComfyUI nodes: conditioning, latents and model patches without text encoders, VAEs or downloads."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import environment  # noqa: F401 - a route
from .compiled import Compile
from .foreign import ForeignGuider, ForeignSampler
from .fun_control import H3Control
from .graph_ends import Conditioning, Latent, SaveLatent, Wait
from .in_place import NODES as IN_PLACE
from .loops import Loop
from .odd_conditions import OddCondition
from .one_ulp import OneUlp
from .pack_code import NODES as PACK_CODE
from .pack_loaders import NODES as PACK_LOADERS
from .pictures import Draw, Heard, Pictures, SaveConcat, SavePictures, Seed, Seen
from .refusables import AttentionPatch, Control, ForeignWrapper, RealControl, Tampered
from .shapes import NODES as SHAPES
from .text_encoders import NODES as TEXT_ENCODERS
from .tiny_models import NODES as TINY_MODELS


class TestNodes(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        ends = [Conditioning, Latent, SaveLatent, Wait, OddCondition, OneUlp, Loop]
        pictures = [Pictures, SavePictures, SaveConcat, Draw, Seed, Seen, Heard]
        foreign = [
            AttentionPatch,
            Compile,
            Control,
            RealControl,
            ForeignGuider,
            ForeignSampler,
            ForeignWrapper,
            Tampered,
            H3Control,
        ]
        return [*ends, *pictures, *foreign, *PACK_CODE, *IN_PLACE, *PACK_LOADERS, *TINY_MODELS, *SHAPES, *TEXT_ENCODERS]


async def comfy_entrypoint() -> ComfyExtension:
    return TestNodes()
