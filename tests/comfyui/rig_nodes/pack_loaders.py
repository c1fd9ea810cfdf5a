"""Loaders of packs, whose MODELs do not say where they come from."""

from __future__ import annotations

import os
from typing import Any

import comfy.ops
import comfy.sd
import comfy.utils
import folder_paths
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

PREFIX = "packed."  # of the names in a file of this pack


class PackOps(comfy.ops.manual_cast):
    """Layers of the pack's own."""

    class Linear(comfy.ops.manual_cast.Linear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)


class PackPatcher(ModelPatcher):
    """A MODEL of the pack's own class."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        made = super().clone(*args, **kwargs)
        made.__class__ = PackPatcher
        return made


class PackLoader(io.ComfyNode):
    """Loads a file whose weights have other names. `kind`: "names" alone; "layers", "patcher" of the pack's own;
    "dice": another MODEL in each process; "host": it fails in a worker; "pipe": the MODEL is the second in a dict."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPackLoader", category="cp test", is_dev_only=True,
            inputs=[io.String.Input("name"), io.String.Input("kind")],
            outputs=[io.Model.Output(), io.Custom("PIPE").Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, name: str, kind: str) -> io.NodeOutput:
        if kind == "host" and "RANK" in os.environ:
            raise RuntimeError("only in ComfyUI")
        path = folder_paths.get_full_path_or_raise("diffusion_models", name)
        state = {key.removeprefix(PREFIX): weight for key, weight in comfy.utils.load_torch_file(path).items()}
        if kind == "dice":
            state = {key: weight + os.getpid() * 1e-9 for key, weight in state.items()}
        options = {"custom_operations": PackOps} if kind == "layers" else {}
        model = comfy.sd.load_diffusion_model_state_dict(dict(state), model_options=options)
        assert model is not None
        if kind == "patcher":
            model.__class__ = PackPatcher
        other = None
        if kind == "pipe":
            other = model
            half = {key: weight * 0.5 for key, weight in state.items()}
            model = comfy.sd.load_diffusion_model_state_dict(half)
        return io.NodeOutput(model, {"model": other, "more": [1]})


class FromPipe(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestFromPipe", category="cp test", is_dev_only=True,
            inputs=[io.Custom("PIPE").Input("pipe")], outputs=[io.Model.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, pipe: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput(pipe["model"])


class Word(io.ComfyNode):
    """A text that another node gets by a link."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestWord", category="cp test", is_dev_only=True,
            inputs=[io.String.Input("text")], outputs=[io.String.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        return io.NodeOutput(text)


NODES = [PackLoader, FromPipe, Word]
