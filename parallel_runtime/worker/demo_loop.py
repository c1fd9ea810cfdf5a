"""The denoising loop where there is no ComfyUI: flow-matching Euler around diffusers' FLUX transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..demo import transformer
from ..for_diffusers import attach, detach
from ..jobs import DemoJob, Job
from ..specs import ModelSpec, Parallelism
from .models import Model
from .pulse import Pulse


@dataclass(eq=False)
class DemoModel(Model):
    """diffusers' transformer, made parallel by `attach`."""

    def divide(self, parallelism: Parallelism) -> None:
        attach(self.network, self.mesh, parallelism)
        self.division.callback(detach, self.network)

    def __call__(self, x: Tensor, timestep: Tensor, cond: dict[str, Any]) -> Any:
        return self.spread(transformer.evaluate, x.shape[0], self.network, x, timestep, cond)


def load(spec: ModelSpec, device: torch.device, on_share: Callable[[float], None], _: Job) -> DemoModel:
    (file,) = spec.files
    network = transformer.load(file.path, device)
    on_share(1.0)
    return DemoModel(spec, network, device=device)


def run(model: DemoModel, job: DemoJob, pulse: Pulse) -> dict[str, Any]:
    """Returns {"samples": [B, C, H, W] in model space}."""
    device = next(model.network.parameters()).device
    sigmas, x = job.sigmas.to(device), job.noise.to(device)
    for step, (sigma, following) in enumerate(pairwise(sigmas)):
        velocity = _velocity(model, job, x, sigma.expand(x.shape[0]), pulse)
        x0 = x - sigma * velocity
        x = x + (following - sigma) * velocity
        pulse.step(step, len(sigmas) - 1, x0, x)
    return {"samples": x}


def _velocity(model: DemoModel, job: DemoJob, x: Tensor, sigma: Tensor, pulse: Pulse) -> Tensor:
    prompts = [job.positive] if job.cfg == 1.0 else [job.positive, job.negative]
    pulse.vote()
    mine = []
    with model.branches.refusing_together():
        for index in model.branches.mine(len(prompts)):
            pulse.evaluating()
            mine.append(model(x, sigma, tree_map_only(Tensor, lambda given: given.to(x.device), prompts[index])))
    done = torch.stack(mine) if mine else x.new_empty((0, *x.shape))
    positive, *negative = model.branches.collect(done, len(prompts))
    return negative[0] + job.cfg * (positive - negative[0]) if negative else positive
