"""An EvaluationJob: one call of the network for a sampler that runs in ComfyUI's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...errors import Refused
from ...specs import EvaluationJob
from ..models import Model
from ..pulse import Pulse
from .merging import merge

KEEP = 8  # the host counts along: see nodes/evaluation.py


class Evaluations:
    """Keeps the conditions of the last prompts, so that a step sends only its latent."""

    def __init__(self) -> None:
        self._prompts: dict[int, dict[str, Any]] = {}

    def __call__(self, model: Model, job: EvaluationJob, pulse: Pulse) -> dict[str, Any]:
        """Returns {"out": ComfyUI's model output [B, C_out, (T,) H, W]}."""
        merge(model, job.patches, pulse.loading)
        pulse.beat()
        device = comfy.model_management.get_torch_device()
        if job.conds is not None:
            self._prompts[job.prompt] = _each(job.conds, lambda tensor: tensor.to(device, copy=True))
            for oldest in list(self._prompts)[:-KEEP]:
                del self._prompts[oldest]
        if job.prompt not in self._prompts:
            raise Refused("the conditions of this prompt were not sent")
        dtype = getattr(torch, model.spec.compute_dtype)  # a cp_config may ask for another than ComfyUI computes in

        def computed(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        conds = _each(self._prompts[job.prompt], computed)
        out = model(job.x.to(device, dtype), job.timestep.to(device), conds)
        pulse.evaluated(out)
        return {"out": out}


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same lists and dicts with every tensor changed."""
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return {name: _each(item, change) for name, item in value.items()} if isinstance(value, dict) else value
