"""Guiders and samplers of another pack, which look like ComfyUI's own from afar."""

from __future__ import annotations

from typing import Any

import comfy.samplers
import torch
from comfy.model_patcher import create_model_options_clone
from comfy.patcher_extension import add_wrapper
from comfy_api.latest import io

from .refusables import halved


class Halved(comfy.samplers.CFGGuider):
    """Guidance of its own."""

    def predict_noise(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().predict_noise(*args, **kwargs) * 0.5


class ForeignGuider(io.ComfyNode):
    """`kind`: `subclass`, or `options`: ComfyUI's guider with a function of guidance on it, not on its MODEL;
    `wrapper`: with a wrapper there; `options of`: with all model options of another MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestForeignGuider",
            category="cp test",
            is_dev_only=True,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.String.Input("kind"),
                io.Model.Input("other", optional=True),
            ],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(cls, model: Any, positive: list, negative: list, kind: str, other: Any = None) -> io.NodeOutput:
        guider = Halved(model) if kind == "subclass" else comfy.samplers.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(2.0)
        if kind == "options":
            guider.model_options = {**guider.model_options, "sampler_post_cfg_function": [_halved]}
        if kind == "options of":
            guider.model_options = other.model_options
        if kind == "wrapper":
            guider.model_options = create_model_options_clone(guider.model_options)
            add_wrapper("predict_noise", halved, guider.model_options, is_model_options=True)
        return io.NodeOutput(guider)


class ForeignSampler(io.ComfyNode):
    """ComfyUI's KSAMPLER around an algorithm that is not ComfyUI's."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestForeignSampler", category="cp test", is_dev_only=True, outputs=[io.Sampler.Output()]
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(comfy.samplers.KSAMPLER(_last_word))


def _last_word(model: Any, x: torch.Tensor, sigmas: torch.Tensor, **_: Any) -> torch.Tensor:
    return x


def _halved(args: dict[str, Any]) -> torch.Tensor:
    return args["denoised"] * 0.5
