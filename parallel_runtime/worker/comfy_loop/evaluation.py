"""An EvaluationJob: one call of the network for a sampler that runs in ComfyUI's process."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

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
        pulse.beat()
        merge(model, job.patches, pulse.loading)
        device = comfy.model_management.get_torch_device()
        dtype = getattr(torch, model.spec.compute_dtype)  # a cp_config may ask for another than ComfyUI computes in
        if job.conds is not None:
            self._prompts[job.prompt] = _on(device, dtype, job.conds)
            for oldest in list(self._prompts)[:-KEEP]:
                del self._prompts[oldest]
        if job.prompt not in self._prompts:
            raise Refused("the conditions of this prompt were not sent")
        return {"out": model(job.x.to(device, dtype), job.timestep.to(device), self._prompts[job.prompt])}


def _on(device: torch.device, dtype: torch.dtype, value: Any) -> Any:
    if torch.is_tensor(value):
        return value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
    if isinstance(value, list):
        return [_on(device, dtype, item) for item in value]
    return {name: _on(device, dtype, item) for name, item in value.items()} if isinstance(value, dict) else value
