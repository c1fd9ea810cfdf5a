"""What rounding does to a sampler: the same run, its noise and its latent moved by one unit in the last place."""

from __future__ import annotations

from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io


class OneUlp(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestOneUlp",
            category="cp test",
            is_dev_only=True,
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher) -> io.NodeOutput:
        moved = model.clone()
        moved.add_wrapper(WrappersMP.OUTER_SAMPLE, _moved)
        return io.NodeOutput(moved)


def _moved(executor: Any, noise: torch.Tensor, latent: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return executor(_up(noise), _up(latent), *args, **kwargs)


def _up(values: torch.Tensor) -> torch.Tensor:
    """Zeros stay: ComfyUI treats an empty latent in another way."""
    return torch.where(values == 0, values, torch.nextafter(values, torch.full_like(values, torch.inf)))
