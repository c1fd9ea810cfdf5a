"""The demo's denoising loop, which needs no ComfyUI: flow-matching Euler around diffusers' FLUX transformer."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..demo import transformer
from ..engine.comm.collectives import refuse_on_all_ranks
from ..for_diffusers import attach, detach
from ..jobs import DemoJob, Job
from ..specs import ModelSpec, Parallelism
from .batch_groups import all_gather, local_items
from .models import Model
from .progress import Progress


@dataclass(eq=False)
class DemoModel(Model):
    """diffusers' transformer, made parallel by `attach`."""

    def split(self, parallelism: Parallelism) -> None:
        attach(self.network, self.mesh, parallelism)
        self.undo_split.callback(detach, self.network)

    def __call__(self, x: Tensor, timestep: Tensor, cond: dict[str, Any]) -> Any:
        return self.data_parallel(transformer.evaluate, x.shape[0], self.network, x, timestep, cond)


def load(spec: ModelSpec, device: torch.device, on_progress: Callable[[float], None], _: Job) -> DemoModel:
    (file,) = spec.files
    network = transformer.load(file.path, device)
    on_progress(1.0)
    return DemoModel(spec, network, device=device)


def run(model: DemoModel, job: DemoJob, progress: Progress) -> dict[str, Any]:
    """Returns {"samples": [B, C, H, W] in model space}."""
    sigmas, x, groups = job.sigmas.to(model.device), job.noise.to(model.device), model.mesh.cfg
    prompts = [job.positive] if job.cfg == 1.0 else [job.positive, job.negative]
    for step, (sigma, following) in enumerate(pairwise(sigmas)):
        progress.vote()
        local = []
        with refuse_on_all_ranks(groups):
            for index in local_items(groups, len(prompts)):
                progress.before_evaluation()
                cond = tree_map_only(Tensor, lambda tensor: tensor.to(model.device), prompts[index])
                local.append(model(x, sigma.expand(x.shape[0]), cond))
        predictions = torch.stack(local) if local else x.new_empty((0, *x.shape))
        positive, *negative = all_gather(groups, predictions, len(prompts))
        velocity = negative[0] + job.cfg * (positive - negative[0]) if negative else positive
        x0 = x - sigma * velocity
        x = x + (following - sigma) * velocity
        progress.step(step, len(sigmas) - 1, x0, x)
    return {"samples": x}
