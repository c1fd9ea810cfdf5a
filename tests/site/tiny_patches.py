"""Lets Load Model Patch read tiny files: it builds its networks by widths that ComfyUI writes into their signatures."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

STYLE = {"siglip_token_nums": 12, "style_token_nums": 3, "siglip_token_dims": 48, "hidden_size": 256}
QWEN = {"num_layers": 2, "dim": 128}
Z_IMAGE = {"dim": 288, "n_heads": 4, "n_kv_heads": 4}


def shrink(patches: ModuleType) -> None:
    """`patches` is ComfyUI's module comfy_extras.nodes_model_patch."""
    of_signature(patches.QwenImageBlockWiseControlNet, QWEN)
    of_signature(patches.SigLIPMultiFeatProjModel, STYLE)
    of_signature(patches.comfy.ldm.lumina.controlnet.ZImage_Control, Z_IMAGE)


def of_signature(kind: Any, sizes: dict[str, int]) -> None:
    parameters = inspect.signature(kind.__init__).parameters.values()
    given = [parameter for parameter in parameters if parameter.default is not parameter.empty]
    kind.__init__.__defaults__ = tuple(sizes.get(parameter.name, parameter.default) for parameter in given)
