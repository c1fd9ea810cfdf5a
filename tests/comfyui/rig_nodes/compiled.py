"""MODEL to be compiled, as ComfyUI's Torch Compile Model leaves it, by backends that are quick to start."""

from __future__ import annotations

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
            inputs=[io.Model.Input("model"), io.String.Input("backend"), io.Boolean.Input("fullgraph", default=False)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, backend: str, fullgraph: bool) -> io.NodeOutput:
        compiled = model.clone()
        set_torch_compile_wrapper(compiled, backend, fullgraph=fullgraph)
        return io.NodeOutput(compiled)
