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
        if job.conds is not None:
            self._prompts[job.prompt] = _on(device, job.conds)
            for oldest in list(self._prompts)[:-KEEP]:
                del self._prompts[oldest]
        if job.prompt not in self._prompts:
            raise Refused("the conditions of this prompt were not sent")
        return {"out": model(job.x.to(device), job.timestep.to(device), self._prompts[job.prompt])}


def _on(device: torch.device, value: Any) -> Any:
    if torch.is_tensor(value):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [_on(device, item) for item in value]
    return {name: _on(device, item) for name, item in value.items()} if isinstance(value, dict) else value
