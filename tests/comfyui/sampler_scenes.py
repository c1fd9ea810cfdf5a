"""The sampler nodes of a later ComfyUI, and what our nodes have of them."""

from __future__ import annotations

from typing import Any

from .pack import node_module

import nodes  # isort: skip  # ComfyUI's: the pack's module has made it importable
from comfy_api.latest import io  # isort: skip
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced  # isort: skip

sampler = node_module("classes.cp_sampler")


class LaterKSampler(nodes.KSampler):
    """With a widget more that is needed, and one that is not."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        given = super().INPUT_TYPES()
        given["required"]["eta"] = ("FLOAT", {"default": 0.5, "step": 0.01, "advanced": True})
        given["optional"] = {"preview": (["none", "small"],), "hint": ("MASK",)}
        return given


class LaterSamplerCustom(SamplerCustomAdvanced):
    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = super().define_schema()
        schema.inputs.append(io.Int.Input("skip", default=2, max=9, optional=True, tooltip="Steps to skip."))
        schema.outputs.append(io.Sigmas.Output(display_name="left"))
        return schema


def like_later(rank: int, world: int, native: str) -> dict[str, Any]:
    """What a page is told of a node of ours that is like a native one of a later ComfyUI."""
    schema = sampler.schema_of(globals()[native], node_id="CPLater", display_name="CP Later")
    schema.finalize()
    info = schema.get_v1_info(sampler.CPSampler)
    return {"input": info.input, "output": info.output, "output_name": info.output_name}
