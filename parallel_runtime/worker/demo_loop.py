"""The denoising loop where there is no ComfyUI: diffusers' flow-matching Euler around the same bridge."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from ..specs import DemoJob
from .models import Model
from .pulse import Pulse


def run(model: Model, job: DemoJob, pulse: Pulse) -> dict[str, Any]:
    """Returns {"samples": [B, C, H, W] in model space}."""
    device = next(model.transformer.parameters()).device
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=job.sigmas[:-1].tolist(), device=device)
    x = job.noise.to(device)
    total = len(job.sigmas) - 1
    for step, timestep in enumerate(scheduler.timesteps):
        sigma = scheduler.sigmas[step]
        velocity = _velocity(model, job, x, sigma.expand(x.shape[0]), pulse)
        x0 = x - sigma * velocity
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        pulse.step(step, total, x0, x)
    return {"samples": x}


def _velocity(model: Model, job: DemoJob, x: Tensor, sigma: Tensor, pulse: Pulse) -> Tensor:
    prompts = [job.positive] if job.cfg == 1.0 else [job.positive, job.negative]
    pulse.vote()
    mine = [model(x, sigma, _on(x.device, prompts[index])) for index in model.branches.mine(len(prompts))]
    done = torch.stack(mine) if mine else x.new_empty((0, *x.shape))
    positive, *negative = model.branches.collect(done, len(prompts))
    return negative[0] + job.cfg * (positive - negative[0]) if negative else positive


def _on(device: torch.device, cond: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in cond.items()}
