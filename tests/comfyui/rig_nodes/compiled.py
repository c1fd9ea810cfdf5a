"""MODEL to be compiled, as ComfyUI's Torch Compile Model leaves it, by backends that are quick to start."""

from __future__ import annotations

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from comfy_api.torch_helpers import set_torch_compile_wrapper


class Compile(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestCompile",
            category="cp test",
            is_dev_only=True,
            inputs=[
                io.Model.Input("model"),
                io.String.Input("backend"),
                io.Boolean.Input("fullgraph", optional=True),
                io.String.Input(
                    "layers", optional=True, tooltip="Compiled as packs do that replace layers by object patches"
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, backend: str, fullgraph: bool = False, layers: str = "") -> io.NodeOutput:
        compiled = model.clone()
        for name in layers.split():
            layer = torch.compile(compiled.get_model_object(name), backend=backend, fullgraph=fullgraph)
            compiled.add_object_patch(name, layer)
        if not layers:
            set_torch_compile_wrapper(compiled, backend, fullgraph=fullgraph)
        return io.NodeOutput(compiled)
